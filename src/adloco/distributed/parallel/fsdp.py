"""A worker's model sharded by FSDP2 over its island, the ranks that serve the worker.

With several replicas of the shards this is HSDP. FSDP2 adds up and scatters the gradient of every
micro-batch. Its reduce-scatter is replaced by one that first measures |g_j|^2 of the unsharded
gradient of micro-batch j, or adds up a transform of it. |g|^2 of the whole step is the sum over the
shards.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from adloco.distributed.device_memory import trim_host_memory
from adloco.distributed.dtensor import local
from adloco.distributed.parallel.engine import Engine, IslandGroup
from adloco.distributed.parallel.gradient_norms import (
    GradientSums,
    Transform,
    squares,
)
from adloco.distributed.parallel.layers import Fill, blocks
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.torch_versions import all_gather_single, reduce_scatter_single
from adloco.distributed.traffic import Traffic, num_bytes


class ShardedModel(Engine):
    """Parameters, gradients and optimizer state spread over the shards of an island."""

    _island: IslandGroup

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
        owners = MatrixOwners(
            island.traffic,
            replicas=island.mesh.get_group(names[0]) if island.replicas > 1 else None,
            shards=island.mesh.get_group(names[1]),
        )
        super().__init__(model, island, owners, compile)
        self._model: FSDPModule = model  # type: ignore[assignment]  # fully_shard changes the class in place.
        self._reduces: list[_MeasuringReduceScatter] = []
        indices = {parameter: index for index, parameter in enumerate(self._parameters)}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are scaled by samples, so gradients are added up; FSDP2 by itself would
                # divide by the number of ranks, or let the collective do it.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                own = [indices[each] for each in _gathered_with(module) if each in indices]
                self._reduces.append(_MeasuringReduceScatter(island.traffic, own))
                # FSDP2's protocols for these classes are not public.
                module.set_custom_reduce_scatter(self._reduces[-1])  # type: ignore[arg-type]
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
    def incoming(self) -> Iterator[GradientSums]:
        norms = GradientSums()
        for reduce in self._reduces:
            reduce.norms = norms
        try:
            yield norms
        finally:
            for reduce in self._reduces:
                reduce.norms = None

    @contextmanager
    def adding(self, totals: Sequence[Tensor], transform: Transform) -> Iterator[None]:
        for reduce in self._reduces:
            reduce.added = totals, transform
        try:
            yield
        finally:
            for reduce in self._reduces:
                reduce.added = None
        if self.replicas > 1:
            self._island.add_up(totals, self._island.mesh.get_group(0))

    def after_evaluation(self) -> None:
        # FSDP2 keeps its root gathered, and would use it again after the shards have changed.
        self._model.reshard()

    def _count(self, reduced: Tensor) -> None:
        self._island.traffic.inside += num_bytes([reduced])


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a collective; FSDP2 asks its custom collectives for it."""
    return torch.empty(*size, dtype=dtype, device=device)


class _MeasuringReduceScatter:
    """A reduce-scatter for one of FSDP2's modules that sees unsharded gradients and counts bytes.

    Its input has a row for each shard; in a row, one parameter's elements follow another's. All
    rows of a parameter are as long as the longest, padded with zeros.
    """

    def __init__(self, traffic: Traffic, members: Sequence[int]) -> None:
        """
        Args:
            traffic: Counts the bytes.
            members: The trainable parameters whose gradients it reduces, in FSDP2's order.
        """
        self.norms: GradientSums | None = None
        self.added: tuple[Sequence[Tensor], Transform] | None = None
        """Totals, a tensor for each trainable parameter, and what gives their summands."""
        self._traffic = traffic
        self._members = members

    allocate = staticmethod(_allocate)

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
        if self.added is not None:
            self._add(*self.added, input_tensor, group, op)
        self._traffic.inside += num_bytes([input_tensor])
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)

    def _add(
        self,
        totals: Sequence[Tensor],
        transform: Transform,
        gradients: Tensor,
        group: dist.ProcessGroup,
        op: Any,
    ) -> None:
        """Reduce-scatter a transform of the unsharded gradients, and add it to the totals."""
        shards = dist.get_world_size(group)
        shapes = [totals[index].shape for index in self._members]
        lengths = [-(-shape[0] // shards) * math.prod(shape[1:]) for shape in shapes]
        rows = gradients.view(shards, -1)
        if rows.size(1) != sum(lengths):
            raise ValueError(
                "some parameters got no gradient, so the others cannot be told apart on shards; "
                "freeze them (requires_grad False), or use batch.rule norm-test"
            )
        transformed = []
        for index, shape, part in zip(
            self._members, shapes, torch.split(rows, lengths, dim=1), strict=True
        ):
            padded = part.reshape(-1, *shape[1:])
            value = transform(index, padded[: shape[0]])
            filled = value.new_zeros(padded.shape)
            filled[: shape[0]] = value
            transformed.append(filled.view(shards, -1))
        sent = torch.cat(transformed, dim=1)
        own = sent.new_empty(sent.size(1))
        self._traffic.inside += num_bytes([sent])
        reduce_scatter_single(own, sent.flatten(), op, group)
        for index, shape, part in zip(
            self._members, shapes, torch.split(own, lengths), strict=True
        ):
            total = local(totals[index])
            total.add_(part.view(-1, *shape[1:])[: len(total)])


class _CountingAllGather:
    """An all-gather for FSDP2 that counts bytes."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    allocate = staticmethod(_allocate)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._traffic.inside += num_bytes([input_tensor])
        return all_gather_single(output_tensor, input_tensor, group, async_op)


def _gathered_with(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 gathers and reduces together with a module, in its order.

    The children's come before a module's own, and a tied one stands where it is first met.
    """
    found: dict[nn.Parameter, None] = {}
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found |= dict.fromkeys(_gathered_with(child))
    return [*(found | dict.fromkeys(module.parameters(recurse=False)))]


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
