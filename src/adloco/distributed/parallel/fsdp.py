"""A worker's model sharded by FSDP2 over its island, the ranks that serve the worker.

With several replicas of the shards this is HSDP. FSDP2 adds up and scatters the gradient of every
micro-batch. Its reduce-scatter is replaced by one that first measures |g_j|^2 of the unsharded
gradient of micro-batch j. |g|^2 of the whole step is the sum over the shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from adloco.distributed.device_memory import trim_host_memory
from adloco.distributed.parallel.engine import Engine, IslandGroup
from adloco.distributed.parallel.gradient_norms import GradientSums, squared_norms, trainable
from adloco.distributed.parallel.layers import Fill, blocks
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.torch_versions import all_gather_single, reduce_scatter_single
from adloco.distributed.traffic import Traffic, num_bytes
from adloco.errors import require


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
        self._taken: list[list[int]] = []
        """Elements of each reduce-scatter of the first micro-batch, by module."""
        self._alike = True
        """True while those of all others were the same."""
        self._used: list[bool] = []
        """Whether parameters had gradients in the first step."""
        self._shards = island.mesh[names[1]].size()
        taken: set[Tensor] = set()
        traffic = island.traffic
        for module in (*blocks(model), model):
            assert isinstance(module, FSDPModule)
            own = [parameter for parameter in trainable(module) if parameter not in taken]
            taken.update(own)
            # Losses are scaled by samples, so gradients are added up; FSDP2 by itself would divide
            # by the number of ranks, or let the collective do it.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            self._reduces.append(_MeasuringReduceScatter(traffic, own))
            # FSDP2's protocols for these classes are not public.
            module.set_custom_reduce_scatter(self._reduces[-1])  # type: ignore[arg-type]
            module.set_custom_all_gather(_CountingAllGather(traffic))  # type: ignore[arg-type]
            if island.replicas > 1:
                # FSDP2 calls this after the all-reduce over replicas.
                module.set_all_reduce_hook(self._count)

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        # Gradients are scattered at every micro-batch, because whole ones may not fit, and summed
        # over replicas once.
        self._model.set_requires_all_reduce(last)
        for reduce in self._reduces:
            reduce.taken()  # What a pass that failed half-way has left.
        yield
        taken = [reduce.taken() for reduce in self._reduces]
        self._taken = self._taken or taken
        self._alike = self._alike and taken == self._taken
        require(
            not last or self._uses_alike(),  # Asked for on all ranks, or the others would wait.
            "some parameters got a gradient on some micro-batches only, which shards cannot add "
            "up; freeze them (requires_grad False), or let every micro-batch use all of them",
        )

    def _uses_alike(self) -> bool:
        """True if on all ranks and in each step the same parameters had gradients, all of a module
        in each of its micro-batches: FSDP2 packs those that there are, and ranks that lack
        different ones would add up gradients of different parameters.
        """
        used = [parameter.grad is not None for parameter in self._parameters]
        if self._used:
            return self._alike and used == self._used
        self._used = used
        own = torch.tensor([*used, *map(sum, self._taken)])
        own = torch.cat([own, -own]).to(self._island.mesh.device_type)
        most = own.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, self._island.group)  # Once in a run: not counted.
        return (
            self._alike
            and most.equal(own)
            and all(
                elements == reduce.elements(self._shards)
                for reduce, each in zip(self._reduces, self._taken, strict=True)
                for elements in each
            )
        )

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

    def _count(self, reduced: Tensor) -> None:
        self._island.traffic.inside += num_bytes([reduced])


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a collective; FSDP2 asks its custom collectives for it."""
    return torch.empty(*size, dtype=dtype, device=device)


class _MeasuringReduceScatter:
    """A reduce-scatter for one of FSDP2's modules that sees unsharded gradients and counts bytes.

    Its input has a row for each shard, padded with zeros. `parameters` are the module's own.
    """

    def __init__(self, traffic: Traffic, parameters: Sequence[Tensor]) -> None:
        self.norms: GradientSums | None = None
        self._traffic, self._parameters = traffic, parameters
        self._taken: list[int] = []

    def taken(self) -> list[int]:
        """Elements of each input since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def elements(self, shards: int) -> int:
        """Elements of an input with all parameters that have a gradient now, padded."""
        used = [parameter for parameter in self._parameters if parameter.grad is not None]
        return sum(-(-len(each) // shards) * shards * each.shape[1:].numel() for each in used)

    allocate = staticmethod(_allocate)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._taken.append(input_tensor.numel())
        if self.norms is not None:
            self.norms.add(*squared_norms([input_tensor]))  # Padding is zero and adds nothing.
        self._traffic.inside += num_bytes([input_tensor])
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


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


def _check_shardable(model: nn.Module) -> None:
    advice = "use placement.shard_size 1 (replicas are no problem)"
    for name, parameter in model.named_parameters():
        require(
            parameter.ndim > 0,
            f"parameters without dimensions such as {name} cannot be sharded; give them the shape "
            f"(1,), or {advice}",
        )
        require(
            not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks),
            f"shards would leave out the hooks of parameter {name}; {advice}",
        )
        require(
            parameter.is_contiguous(),
            f"parameter {name} is not contiguous, as shards must be; make it with .contiguous(), "
            f"or {advice}",
        )
    types = sorted(
        {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    )
    require(
        len(types) <= 1,
        f"shards need parameters of one data type, got {' and '.join(types)}; convert the model, "
        f"or {advice}",
    )
