"""A worker's model as its island runs it: whole on one rank, replicated (DDP), or sharded (FSDP2,
and HSDP with replicas of the shards).

An inner step is a sum over micro-batches, of which each rank of the island computes its part; the
losses are scaled by samples beforehand, so that gradients are summed, not averaged, and unequal
parts weigh what they should. |g_j|^2 of a micro-batch is taken before any reduction: by hooks on
the parameters, or where FSDP2 hands over the unsharded gradient to be reduced and scattered.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from adloco.distributed.device_memory import trim_host_memory
from adloco.distributed.parallel.gradient_norms import (
    GradientSums,
    incoming_gradients,
    squared_norm,
    squares,
    trainable,
)
from adloco.distributed.parallel.layers import Fill, blocks, fill_whole
from adloco.distributed.traffic import Traffic, num_bytes


class Engine(Protocol):
    """A worker's model on the ranks of its island. What is called a part belongs to this rank; sums
    are over the island.
    """

    forward: Callable[..., Any]
    """The model as the loss function must call it."""
    rank: int
    """Number of this rank on the island; it takes the micro-batches `BatchPlan.of_rank` says."""

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. last: whether the gradients are needed
        after it.
        """
        ...

    def incoming(
        self, reference: Sequence[Tensor | None] | None = None
    ) -> AbstractContextManager[GradientSums]:
        """While open, sums |g|^2, or with `reference` <g, reference>, of the gradients of this
        rank's micro-batches, before they are reduced.
        """
        ...

    def norm_sq_part(self) -> float:
        """This rank's part of the squared norm of the reduced gradient."""
        ...

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The numbers added up over the island, in float64; the same on all of its ranks, to the
        last bit.
        """
        ...

    def after_evaluation(self) -> None:
        """Free what forward passes without a backward pass have left gathered."""
        ...

    def average(self, buffers: Sequence[Tensor]) -> None:
        """Make buffers that each rank has updated from its own micro-batches equal on the island."""
        ...


class SingleDevice:
    """The model on one rank."""

    rank = 0

    def __init__(
        self, model: nn.Module, device: torch.device, compile: bool, fill: Fill | None
    ) -> None:
        if fill:
            fill_whole(model, fill)
        model.to(device)
        self.forward: Callable[..., Any] = torch.compile(model) if compile else model
        self._parameters = trainable(model)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def incoming(
        self, reference: Sequence[Tensor | None] | None = None
    ) -> AbstractContextManager[GradientSums]:
        return incoming_gradients(self._parameters, reference)

    def norm_sq_part(self) -> float:
        return squared_norm(_gradients(self._parameters))

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def after_evaluation(self) -> None:
        return

    def average(self, buffers: Sequence[Tensor]) -> None:
        return


class _OnIsland:
    """What replicated and sharded models have in common."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, traffic: Traffic
    ) -> None:
        self.rank = dist.get_rank(group)
        self._parameters = trainable(model)
        self._mesh = mesh
        self._group = group
        self._traffic = traffic
        self._replicas = mesh["replica"].size()

    def norm_sq_part(self) -> float:
        # Each replica has the same gradient.
        return squared_norm(_gradients(self._parameters)) / self._replicas

    def sum(self, numbers: Sequence[float]) -> list[float]:
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self._mesh.device_type)
        dist.all_reduce(total, group=self._group)
        self._traffic.inside += num_bytes([total])
        return [float(number) for number in total.tolist()]

    @torch.no_grad()
    def average(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            dist.all_reduce(buffer, group=self._group)
            buffer.div_(dist.get_world_size(self._group))
            self._traffic.inside += num_bytes([buffer])


class ReplicatedModel(_OnIsland):
    """A copy of the model on each rank, by DistributedDataParallel."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        traffic: Traffic,
        compile: bool,
        fill: Fill | None,
    ) -> None:
        if fill:
            fill_whole(model, fill)
        model.to(mesh.device_type)
        super().__init__(model, mesh, group, traffic)
        self._ddp = DistributedDataParallel(
            model, process_group=group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        self._ddp.register_comm_hook(group, self._sum_up)
        self.forward: Callable[..., Any] = torch.compile(self._ddp) if compile else self._ddp

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        if not last:
            with self._ddp.no_sync():
                yield
            return
        self._reduced = 0
        yield
        if self._reduced < sum(parameter.numel() for parameter in self._parameters):
            # DDP leaves their buckets as they are, each replica with its own, and complains a step
            # later.
            raise ValueError(
                "some parameters got no gradient, which replicas cannot add up; freeze them (requires_grad False), or use shards"
            )

    def incoming(
        self, reference: Sequence[Tensor | None] | None = None
    ) -> AbstractContextManager[GradientSums]:
        # Hooks on parameters run before DDP puts the gradient into its buckets.
        return incoming_gradients(self._parameters, reference)

    def after_evaluation(self) -> None:
        return

    def _sum_up(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        self._reduced += gradients.numel()
        self._traffic.inside += num_bytes([gradients])
        work = dist.all_reduce(gradients, group=group, async_op=True)
        assert work is not None
        done: torch.futures.Future[Tensor] = work.get_future().then(
            lambda future: future.value()[0]
        )
        return done


class ShardedModel(_OnIsland):
    """The model's parameters, gradients and optimizer state spread over the shards by FSDP2; with
    several replicas of the shards, HSDP.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        traffic: Traffic,
        compile: bool,
        fill: Fill | None,
    ) -> None:
        over = mesh["replica", "shard"] if mesh["replica"].size() > 1 else mesh["shard"]
        _check_shardable(model)
        for part in (*blocks(model), model):
            if fill:
                fill(model, part)
            fully_shard(part, mesh=over)
            # Of the whole part: 834 MiB at most with this, 1,050 without (305M parameters, 2
            # shards).
            trim_host_memory()
        super().__init__(model, mesh, group, traffic)
        self.forward: Callable[..., Any] = torch.compile(model) if compile else model
        self._model: FSDPModule = model  # type: ignore[assignment]  # fully_shard changes the class in place.
        self._reduce = _CountingReduceScatter(traffic)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(self._reduce)  # type: ignore[arg-type]  # The protocol's classes are not public.
                module.set_custom_all_gather(_CountingAllGather(traffic))  # type: ignore[arg-type]
                if self._replicas > 1:
                    module.set_all_reduce_hook(
                        self._count
                    )  # Called after the all-reduce over replicas.

    def _count(self, reduced: Tensor) -> None:
        self._traffic.inside += num_bytes([reduced])

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        # Scattered at every micro-batch, as whole gradients may not fit; summed over replicas once.
        self._model.set_requires_all_reduce(last)
        return nullcontext()

    def after_evaluation(self) -> None:
        # FSDP2 keeps its root gathered, and would use it again when the shards have changed.
        self._model.reshard()

    @contextmanager
    def incoming(self, reference: Sequence[Tensor | None] | None = None) -> Iterator[GradientSums]:
        assert reference is None, "inner products need whole gradients; AdLoCo refuses them"
        self._reduce.seen = GradientSums()
        try:
            yield self._reduce.seen
        finally:
            self._reduce.seen = None


class _CountingReduceScatter:
    """FSDP2's reduce-scatter, which also sees the unsharded gradient of every micro-batch and
    counts bytes.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.seen: GradientSums | None = None
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.seen is not None:
            self.seen.add(squares(input_tensor))  # Padding is zeros.
        self._traffic.inside += num_bytes([input_tensor])
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class _CountingAllGather:
    """FSDP2's all-gather, counting bytes."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._traffic.inside += num_bytes([input_tensor])
        return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


def _check_shardable(model: nn.Module) -> None:
    advice = "use placement.shard_size 1 (replicas are no problem)"
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ValueError(
            f"parameters without dimensions such as {scalars[0]} cannot be sharded; give them the shape (1,), or {advice}"
        )
    types = sorted(
        {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    )
    if len(types) > 1:
        raise ValueError(
            f"shards need parameters of one data type, got {' and '.join(types)}; convert the model, or {advice}"
        )


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
