"""The islands that host the workers of a sum, as one of their ranks sees them.

An island is the group of ranks that serve the same workers. Its ranks that have the same values
each exchange one slice with other islands, and then gather the slices inside the island. So each
byte crosses between islands once. One island exchanges nothing: it has all workers of the sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.torch_versions import all_gather_single
from adloco.distributed.traffic import Traffic, num_bytes


@dataclass(frozen=True, kw_only=True)
class Islands:
    """The islands of a sum."""

    workers: Sequence[int]
    """Number of workers that each island hosts."""
    traffic: Traffic
    me: int | None = 0
    """Number of this rank's island among them; None if it is none of them."""
    group: dist.ProcessGroup | None = None
    """The ranks that have this rank's position on each of the islands; None for one island."""
    same: Callable[[bool], dist.ProcessGroup | None] = lambda sharded: None
    """Gives the ranks of this island that have the same sharded (True) or other tensors as this
    rank, or None if it is alone."""
    rank_of: Callable[[int], int] = lambda worker: 0
    """Gives the rank with this rank's position on a worker's island."""

    @property
    def num_workers(self) -> int:
        """Workers of the sum."""
        return sum(self.workers)

    @property
    def here(self) -> range:
        """The sum's workers that this island hosts."""
        assert self.me is not None
        before = sum(self.workers[: self.me])
        return range(before, before + self.workers[self.me])

    def counts(self, sharded: bool) -> bool:
        """True on one of this island's ranks that have the same tensors: it counts them."""
        same = self.same(sharded)
        return same is None or dist.get_rank(same) == 0

    def owns(self, sharded: bool) -> bool:
        """True if this rank counts its `slices`; one island has whole tensors on all its ranks."""
        return self.group is not None or self.counts(sharded)

    def part(self, rows: int, sharded: bool) -> slice:
        """Rows that this rank exchanges, of those that all ranks with the same tensors have."""
        same = self.same(sharded)
        if self.group is None or same is None:
            return slice(None)
        size = -(-rows // dist.get_world_size(same))
        return slice(size * dist.get_rank(same), size * (dist.get_rank(same) + 1))

    def slices(self, rows: Tensor, sharded: bool) -> Tensor:
        """The part of the second dimension that this rank exchanges; a copy if it is not all."""
        part = self.part(rows.shape[1], sharded)
        if part == slice(None):
            return rows
        return rows[:, part].clone(memory_format=torch.contiguous_format)

    def joined(self, mine: Tensor, rows: int, sharded: bool) -> Tensor:
        """Gather the slices of this island's ranks that have the same tensors: (rows, ...)."""
        same = self.same(sharded)
        if self.group is None or same is None:
            return mine
        slices = gathered(mine, -(-rows // dist.get_world_size(same)), same)
        self.traffic.inside += num_bytes([slices[0]])
        return slices.flatten(0, 1)[:rows]


def gathered(mine: Tensor, longest: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather what each rank of the group has, of shape (rows, ...), padded with zeros to the
    longest: (ranks, longest, ...).
    """
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
    everyone = padded.new_empty(dist.get_world_size(group), *padded.shape)
    all_gather_single(everyone.view(-1), padded.view(-1), group=group)
    return everyone
