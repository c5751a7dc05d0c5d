"""Reductions among workers, with one entry per local worker (DESIGN section 3, seam 1).

`mean` adds the local entries first; a placement over several ranks then reduces over its group, and callers cannot tell the difference. Traffic
between workers is counted as if every worker stood on an island of its own, so that the figure is a property of the algorithm and not of the
placement; what the ranks of one island exchange is counted apart.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from adloco.placement.shards import local

PerWorker = Sequence[Sequence[Tensor]]
"""One sequence of tensors for each local worker, alike in shapes."""


class Traffic:
    """Payload bytes that this process has handed to collectives, in one direction."""

    def __init__(self) -> None:
        self.between = 0
        """To reductions with other workers: what would leave an island if each worker had one of its own."""
        self.inside = 0
        """To collectives among the ranks that serve one worker."""


class Comm(Protocol):
    """Reductions among a fixed set of workers. Every worker of the set takes part in every call, in the same order."""

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        """Weighted sum over all workers of the set. weights: one per local worker; over the whole set they add up to 1."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        """The tensors as worker `source` has them, for the workers that lack them; nothing is sent if there are none."""
        ...


class LocalComm:
    """All workers of the set live in one process (or on one island); elsewhere, where none takes part, the set is empty."""

    def __init__(self, num_workers: int, traffic: Traffic, counts: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        """counts: whether this rank counts the bytes of a tensor; of several ranks that hold the same, one does."""
        self.num_workers = num_workers
        self.traffic = traffic
        self._counts = counts

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        assert len(per_worker) == len(weights) == self.num_workers, "one entry and one weight per worker"
        if not per_worker:
            return []
        self._count([tensor for entry in per_worker for tensor in entry])
        return [weighted_sum(entries, weights) for entries in zip(*per_worker, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if receivers:
            self._count(tensors)
        return list(tensors)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        if self.num_workers > 1:
            self.traffic.between += num_bytes([tensor for tensor in tensors if self._counts(tensor)])


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Payload of these tensors as they are; of sharded ones, of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def weighted_sum(entries: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum of the entries, each times its weight, as a new tensor."""
    result = entries[0] * weights[0]
    for entry, weight in zip(entries[1:], weights[1:], strict=True):
        result.add_(entry, alpha=weight)
    return result
