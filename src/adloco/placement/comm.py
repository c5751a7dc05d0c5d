"""Reductions among workers, with one entry per local worker (DESIGN section 3, seam 1).

`mean` adds the local entries first; a placement over several ranks then reduces over its group, and callers cannot tell the difference. Traffic is
counted as if every worker stood on an island of its own, so that the figure is a property of the algorithm and not of the placement.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

PerWorker = Sequence[Sequence[Tensor]]
"""One sequence of tensors for each local worker, alike in shapes."""


class Traffic:
    """Bytes handed to reductions with others, in one direction, summed over workers."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, payload_bytes: int) -> None:
        self.bytes += payload_bytes


class Comm(Protocol):
    """Reductions among a fixed set of workers. Every worker of the set takes part in every call, in the same order."""

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        """Weighted mean over all workers of the set; weights: one per local worker, >= 0, not all zero over the set."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        """The tensors as worker `source` has them, for the workers that lack them; nothing is sent if there are none."""
        ...


class LocalComm:
    """All workers of the set live in one process; in the others, which take no part, the set is empty."""

    def __init__(self, num_workers: int, traffic: Traffic) -> None:
        self.num_workers = num_workers
        self.traffic = traffic

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        assert len(per_worker) == len(weights) == self.num_workers, "one entry and one weight per worker"
        if not per_worker:
            return []
        total = sum(weights)
        self._count(sum(num_bytes(entry) for entry in per_worker))
        return [weighted_sum(entries, [weight / total for weight in weights]) for entries in zip(*per_worker, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if receivers:
            self._count(num_bytes(tensors))
        return list(tensors)

    def _count(self, payload_bytes: int) -> None:
        if self.num_workers > 1:
            self.traffic.add(payload_bytes)


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Payload of these tensors as they are."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def weighted_sum(entries: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum of the entries, each times its weight, as a new tensor."""
    result = entries[0] * weights[0]
    for entry, weight in zip(entries[1:], weights[1:], strict=True):
        result.add_(entry, alpha=weight)
    return result
