"""The protocol of a worker's model on its island, the group of ranks that serve the worker.

The model is on one rank, replicated (DDP) or sharded (FSDP2). An inner step is a sum over
micro-batches, and each rank computes some of them. The losses are scaled by samples beforehand, so
gradients are summed and not averaged, and each micro-batch is weighted by its samples. |g_j|^2, the
squared norm of the gradient of micro-batch j, is measured before any reduction between ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from adloco.distributed.dtensor import local
from adloco.distributed.parallel.gradient_norms import Block, GradientSums, Transform
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic, num_bytes


class Engine(Protocol):
    """A worker's model on the ranks of its island."""

    forward: Callable[..., Any]
    """The model, as the loss function must call it."""
    rank: int
    """Number of this rank on the island; it takes the micro-batches `BatchPlan.of_rank` names."""
    owners: MatrixOwners
    """The ranks that share the work on whole matrices."""
    replicas: int
    """Ranks of the island that have the same part of the reduced gradient."""

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward pass of a micro-batch.

        Args:
            last: True for the last micro-batch of a step, whose backward pass must leave gradients
                summed over the island.
        """
        ...

    def incoming(
        self, reference: Sequence[Tensor | None] | None = None
    ) -> AbstractContextManager[GradientSums]:
        """Sum |g|^2 of this rank's micro-batches while open, before gradients are reduced.

        Args:
            reference: A tensor for each trainable parameter, or None for zero. Sums the inner
                product <g, reference> in place of |g|^2.
        """
        ...

    def adding(
        self, totals: Sequence[Tensor], transform: Transform
    ) -> AbstractContextManager[None]:
        """Add up a transform of the gradients of all ranks' micro-batches while open.

        The gradients are those of single micro-batches, before they are reduced. When the context
        closes, the totals are sums over the island.

        Args:
            totals: A tensor for each trainable parameter, sharded like it.
            transform: Gives what is added to the total of a parameter.

        Raises:
            ValueError: Shards would have to add up gradients that some parameters do not have.
        """
        ...

    def gram_part(self, matrix: Tensor, block: Block) -> Tensor:
        """This rank's part of the Gram matrix (see `gram`) of a block of a matrix.

        The parts of the island's ranks add up to the Gram matrix. Called on all of them.

        Args:
            matrix: A matrix that is sharded like a parameter.
            block: The part of it.
        """
        ...

    def norm_sq_part(self) -> float:
        """This rank's part of the squared norm of the reduced gradient.

        The parts of the island's ranks add up to the squared norm.
        """
        ...

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up each number over the island, in float64.

        Every rank of the island gets the same bits.
        """
        ...

    def average(self, buffers: Sequence[Tensor]) -> None:
        """Set tensors that each rank has updated on its own to their mean over the island."""
        ...

    def after_evaluation(self) -> None:
        """Free parameters that forward passes without a backward pass have left gathered."""
        ...


class IslandGroup:
    """The ranks that serve one worker together, and sums over them."""

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """
        Args:
            mesh: The ranks of the island by replica and shard.
            group: The same ranks as one group.
            traffic: Counts the bytes that the ranks exchange.
        """
        self.mesh = mesh
        self.group = group
        self.traffic = traffic
        self.rank = dist.get_rank(group)
        self.replicas = mesh.size(0)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up each number over the island, in float64."""
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total, group=self.group)
        self.traffic.inside += num_bytes([total])
        return [float(number) for number in total.tolist()]

    @torch.no_grad()
    def average(self, buffers: Sequence[Tensor]) -> None:
        """Set tensors to their mean over the island."""
        self.add_up(buffers, self.group)
        for buffer in buffers:
            buffer.div_(dist.get_world_size(self.group))

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Set tensors, of sharded ones this rank's shards, to their sum over some of the ranks."""
        for tensor in tensors:
            dist.all_reduce(local(tensor), group=group)
            self.traffic.inside += num_bytes([tensor])
