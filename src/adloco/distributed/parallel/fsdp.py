"""A worker's model sharded by FSDP2 over its island, the ranks that serve the worker.

With several replicas of the shards this is HSDP. FSDP2 adds up and scatters the gradient of every
micro-batch. Its reduce-scatter is replaced by one that first measures |g_j|^2 of the unsharded
gradient of micro-batch j. |g|^2 of the whole step is the sum over the shards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from adloco.distributed.device_memory import trim_host_memory
from adloco.distributed.parallel.engine import IslandGroup
from adloco.distributed.parallel.gradient_norms import (
    GradientSums,
    gradients,
    squared_norm,
    squares,
    trainable,
)
from adloco.distributed.parallel.layers import Fill, blocks
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic, num_bytes


class ShardedModel:
    """Parameters, gradients and optimizer state spread over the shards of an island."""

    def __init__(
        self, model: nn.Module, island: IslandGroup, compile: bool, fill: Fill | None
    ) -> None:
        mesh, names = island.mesh, island.mesh.mesh_dim_names
        assert names is not None
        mesh = mesh if island.replicas > 1 else mesh[names[1]]
        _check_shardable(model)
        for part in (*blocks(model), model):
            if fill:
                fill(model, part)
            fully_shard(part, mesh=mesh)
            # Frees the unsharded part: the peak is 834 MiB with this and 1,050 MiB without it
            # (305M parameters, 2 shards).
            trim_host_memory()
        self.rank = island.rank
        self.owners = MatrixOwners(
            island.traffic,
            replicas=island.mesh.get_group(names[0]) if island.replicas > 1 else None,
            shards=island.mesh.get_group(names[1]),
        )
        self._island = island
        self._parameters = trainable(model)
        self.forward: Callable[..., Any] = torch.compile(model) if compile else model
        self._model: FSDPModule = model  # type: ignore[assignment]  # fully_shard changes the class in place.
        self._reduce = _MeasuringReduceScatter(island.traffic)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # FSDP2's protocols for these classes are not public.
                module.set_custom_reduce_scatter(self._reduce)  # type: ignore[arg-type]
                module.set_custom_all_gather(_CountingAllGather(island.traffic))  # type: ignore[arg-type]
                if island.replicas > 1:
                    # FSDP2 calls this after the all-reduce over replicas.
                    module.set_all_reduce_hook(self._count)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        # Gradients are scattered at every micro-batch, because whole ones may not fit, and summed
        # over replicas once.
        self._model.set_requires_all_reduce(last)
        return nullcontext()

    @contextmanager
    def incoming(self, reference: Sequence[Tensor | None] | None = None) -> Iterator[GradientSums]:
        assert reference is None, "inner products need whole gradients; AdLoCo refuses them"
        self._reduce.norms = GradientSums()
        try:
            yield self._reduce.norms
        finally:
            self._reduce.norms = None

    def norm_sq_part(self) -> float:
        # Every replica of a shard has the same gradient.
        return squared_norm(gradients(self._parameters)) / self._island.replicas

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._island.sum(numbers)

    def average(self, buffers: Sequence[Tensor]) -> None:
        self._island.average(buffers)

    def after_evaluation(self) -> None:
        # FSDP2 keeps its root gathered, and would use it again after the shards have changed.
        self._model.reshard()

    def _count(self, reduced: Tensor) -> None:
        self._island.traffic.inside += num_bytes([reduced])


class _MeasuringReduceScatter:
    """A reduce-scatter for FSDP2 that takes norms of unsharded gradients and counts bytes."""

    def __init__(self, traffic: Traffic) -> None:
        self.norms: GradientSums | None = None
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
        if self.norms is not None:
            self.norms.add(squares(input_tensor))  # Padding is zero and adds nothing.
        self._traffic.inside += num_bytes([input_tensor])
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class _CountingAllGather:
    """An all-gather for FSDP2 that counts bytes."""

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
            f"parameters without dimensions such as {scalars[0]} cannot be sharded; "
            f"give them the shape (1,), or {advice}"
        )
    types = sorted(
        {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    )
    if len(types) > 1:
        raise ValueError(
            f"shards need parameters of one data type, got {' and '.join(types)}; "
            f"convert the model, or {advice}"
        )
