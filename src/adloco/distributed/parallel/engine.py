"""A worker's model on its island, the group of ranks that serve the worker.

The model is on one rank, replicated (DDP) or sharded (FSDP2). An inner step is a sum over
micro-batches, and each rank computes some of them. The losses are scaled by samples beforehand, so
gradients are summed and not averaged, and each micro-batch is weighted by its samples. |g_j|^2, the
squared norm of the gradient of micro-batch j, is measured before any reduction between ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from adloco.distributed.parallel.gradient_norms import (
    GradientSums,
    gradients,
    squared_norm_on_device,
    trainable,
)
from adloco.distributed.parallel.layers import blocks
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic, num_bytes
from adloco.errors import require


class Engine(ABC):
    """A worker's model on the ranks of its island."""

    def __init__(
        self, model: nn.Module, island: "IslandGroup | None", owners: MatrixOwners, compile: bool
    ) -> None:
        """
        Args:
            model: The model; a wrapper of it where there is one.
            island: The ranks that serve the worker; None: this one alone.
        """
        require(
            island is None
            or not any(
                isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm
                for each in model.modules()
            ),
            "an embedding with max_norm changes its rows in forward passes, on each rank others; "
            "build it without max_norm, or take one rank for each worker (placement.shard_size 1 "
            "and replica_size 1)",
        )
        self.forward: Callable[..., Any] = compiled(model) if compile else model
        """The model, as the loss function must call it."""
        self.compiles = compile
        self.rank = island.rank if island else 0
        """Number of this rank on the island; it takes the micro-batches `BatchPlan.of_rank` names.
        """
        self.replicas = island.replicas if island else 1
        """Ranks of the island that have the same part of the reduced gradient."""
        self.owners = owners
        self.sums: GradientSums | None = None
        """While `incoming` is open, what it sums."""
        self._island = island
        self._parameters = trainable(model)

    @abstractmethod
    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward pass of a micro-batch.

        last: True for the last micro-batch of a step, whose backward pass must leave gradients
            summed over the island.
        """

    @abstractmethod
    def incoming(self) -> AbstractContextManager[GradientSums]:
        """Sum |g|^2 of this rank's micro-batches while open, before gradients are reduced."""

    @property
    def is_alone(self) -> bool:
        """True if the model is on this rank alone."""
        return self._island is None

    def norm_sq_part(self) -> Tensor:
        """This rank's part of the squared norm of the reduced gradient, a float64 scalar.

        The parts of the island's ranks add up to the squared norm.
        """
        # Each replica has all of its part.
        return squared_norm_on_device(gradients(self._parameters)) / self.replicas

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up each number over the island, in float64.

        Every rank of the island gets the same bits.
        """
        return self._island.sum(numbers) if self._island else [float(each) for each in numbers]

    def sum_on_device(self, numbers: Sequence[Tensor | float]) -> Tensor:
        """`sum` of scalars, some of them on a device, which is not waited for."""
        device = self._parameters[0].device
        # Filled on the device: a copy from host memory would wait for it.
        own = torch.stack(
            [
                number.double().to(device)
                if isinstance(number, Tensor)
                else torch.full((), number, dtype=torch.float64, device=device)
                for number in numbers
            ]
        )
        return self._island.sum_on_device(own) if self._island else own

    def average(self, buffers: Iterable[Tensor]) -> None:
        """`IslandGroup.average`, where several ranks serve the worker."""
        if self._island:
            self._island.average(buffers)


def compiled(model: nn.Module) -> Callable[..., Any]:
    """A model that is compiled for training: its repeated blocks, as one graph for all of them, or
    the whole of a model without such blocks.
    """
    if not (repeated := blocks(model)):
        return torch.compile(model)
    for block in repeated:
        if not isinstance(block.forward, _InTraining):
            block.forward = _InTraining(block)
    return model


class _InTraining:
    """The forward pass of a block: compiled in training, and plain in evaluation and generation,
    whose other shapes would be compiled one after another.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._plain = block, block.forward
        self._compiled = torch.compile(block.forward)

    def __reduce__(self) -> Any:
        # A copy of the model must compute with its own block.
        return _InTraining, (self._block,)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return (self._compiled if self._block.training else self._plain)(*inputs, **named)


class IslandGroup:
    """The ranks that serve one worker together, and sums over them."""

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """
        Args:
            mesh: The ranks of the island by replica and shard.
            group: The same ranks as one group.
        """
        self.mesh = mesh
        self.group = group
        self.traffic = traffic
        self.rank = dist.get_rank(group)
        self.replicas = mesh.size(0)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up each number over the island, in float64: the same bits on all its ranks."""
        own = torch.tensor(list(numbers), dtype=torch.float64, device=self.mesh.device_type)
        return self.sum_on_device(own).tolist()

    @torch.no_grad()
    def average(self, buffers: Iterable[Tensor]) -> None:
        """Set tensors that each rank has updated on its own to their mean over the island. In
        float64 equal values stay as they are, and a sum of the largest ones is finite.
        """
        own = [*buffers]
        if not own:
            return
        whole = torch.cat([buffer.double().flatten() for buffer in own])
        whole = self.sum_on_device(whole).div_(dist.get_world_size(self.group))
        for buffer, mean in zip(own, torch.split(whole, [*map(Tensor.numel, own)]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def sum_on_device(self, own: Tensor) -> Tensor:
        """Add up each element over the island, in place."""
        dist.all_reduce(own, group=self.group)
        self.traffic.inside += num_bytes([own])
        return own
