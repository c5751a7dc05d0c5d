"""Bytes that cross between workers, and between the ranks of an island.

Traffic between workers is counted as if every worker stood on an island of its own, so that the
figure is a property of the algorithm and not of the placement; what the ranks of one island
exchange is counted apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from adloco.distributed.dtensor import local


class Bytes(NamedTuple):
    """Payload in one direction."""

    between: float
    """Handed to reductions with other workers."""
    sent: float
    """What of it leaves a worker's island, over and over where it has to: a ring of W sends 2 (W -
    1) / W of what it adds up.
    """
    inside: float
    """Handed to collectives among the ranks that serve one worker."""

    def __sub__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Traffic:
    """Bytes that this process has handed to collectives; see `Bytes`."""

    def __init__(self) -> None:
        self.between = 0
        self.sent = 0.0
        self.inside = 0

    def add(self, handed: int, times: float) -> int:
        """Count bytes for other workers, and return them. times: How often each leaves the island."""
        self.between += handed
        self.sent += handed * times
        return handed

    def total(self) -> Bytes:
        """All so far."""
        return Bytes(self.between, self.sent, self.inside)


def ring(workers: int) -> float:
    """How often each byte of an all-reduce leaves a worker of so many: once in the reduce-scatter
    and once in the all-gather, less its own part.
    """
    return 2 * (workers - 1) / workers


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Payload of these tensors as they are; of sharded ones, of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
