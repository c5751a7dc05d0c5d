"""A worker's whole model: on one rank, or on each rank of its island, replicated by DDP.

DDP by itself averages gradients. Our losses are scaled by samples, so a communication hook adds the
gradients up instead. |g_j|^2 of micro-batch j is measured by hooks on the parameters, which run
before DDP puts a gradient into its buckets.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adloco.distributed.parallel.engine import Engine, IslandGroup
from adloco.distributed.parallel.gradient_norms import GradientSums, incoming_gradients
from adloco.distributed.parallel.layers import Fill, fill_whole
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic, num_bytes
from adloco.errors import require


class WholeModel(Engine):
    """A copy of the model on each rank of the island, by DistributedDataParallel if they are more
    than one.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        island: IslandGroup | None,
        compile: bool,
        fill: Fill | None,
    ) -> None:
        if fill:
            fill_whole(model, fill)
        model.to(device)
        self._ddp = self._replicated(model, island) if island else None
        owners = MatrixOwners(island.traffic, island.group) if island else MatrixOwners(Traffic())
        super().__init__(self._ddp or model, island, owners, compile)

    def _replicated(self, model: nn.Module, island: IslandGroup) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            model, process_group=island.group, gradient_as_bucket_view=True
        )
        # DDP copies buffers from the first replica when it is made, and would do so again in each
        # forward pass. The argument that stops this was renamed after torch 2.11 (there it stops
        # the first copy too), so both attributes are set: each version reads one of them.
        ddp.forward_sync_buffers = False
        ddp.broadcast_buffers = False
        ddp.register_comm_hook(island, self._sum_hook)
        return ddp

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        if self._ddp is None:
            yield
            return
        if not last:
            with self._ddp.no_sync():
                yield
            return
        self._reduced = 0
        yield
        # DDP would leave the buckets of such a parameter different on each replica, and raise a
        # step later.
        require(
            self._reduced >= sum(parameter.numel() for parameter in self._parameters),
            "some parameters got no gradient, which replicas cannot add up; freeze them "
            "(requires_grad False), or use shards if no micro-batch uses them",
        )

    @contextmanager
    def incoming(self) -> Iterator[GradientSums]:
        with incoming_gradients(self._parameters) as self.sums:
            try:
                yield self.sums
            finally:
                self.sums = None

    def _sum_hook(
        self,
        island: IslandGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Sum a bucket of gradients over the replicas; DDP calls it for each full bucket."""
        reduced = bucket.buffer()
        self._reduced += reduced.numel()
        island.traffic.inside += num_bytes([reduced])
        work = dist.all_reduce(reduced, group=island.group, async_op=True)
        assert work is not None
        done: torch.futures.Future[Tensor] = work.get_future().then(
            lambda future: future.value()[0]
        )
        return done
