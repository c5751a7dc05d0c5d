"""Copies of a run's state in the memory of two islands, so that those that are left after a loss go
on from a round that no disk has (`run.copy_every`).

After a round each island copies the state of its own workers to host memory, and sends the copy to
the next island. If one island is lost, the others still have all parts of that round.
"""

from collections.abc import Mapping
from typing import Any

from adloco.distributed.placement.placement import Placement
from adloco.distributed.plain_state import split_state
from adloco.distributed.traffic import num_bytes

Copies = Mapping[str, Mapping[str, Any]]
"""The parts of a run's state that this process has in memory, by the name of the checkpoint that
they would make, and by part.
"""
NO_COPIES: Copies = {}


class MemoryCopies:
    """The copies that this process keeps: of its own island and of the one before it."""

    def __init__(self, placement: Placement, every: int) -> None:
        """
        Args:
            placement: The ranks.
            every: Rounds from one copy to the next; 0: none are made.
        """
        self.copies: dict[str, dict[str, Any]] = {}
        self.bytes_kept = 0
        """Bytes of tensors in the newest copies here."""
        self._placement = placement
        self._islands = placement.num_ranks // placement.ranks_per_worker
        self._every = every if self._islands > 1 else 0

    @property
    def made(self) -> bool:
        """True if this run makes copies."""
        return self._every > 0

    def due(self, round: int) -> bool:
        """True if copies are to be made after this round."""
        return self.made and round % self._every == 0

    def keep(self, name: str, parts: Mapping[str, Any]) -> int:
        """Keep the parts of this island, and exchange copies with its neighbours.

        Called on all ranks, after a round. Those of the time before are kept too, because a rank
        that is lost meanwhile can leave the new ones incomplete.

        Args:
            name: Name of the checkpoint that the parts would make.
            parts: Those that this process would write; they are not changed any more.

        Returns:
            Bytes of tensors that all islands have sent.
        """
        kept = dict(parts)
        if self._placement.is_island_first:
            kept |= self._from_island_before(parts)
        own, all_here = _size(parts), _size(kept)
        sent = sum(self._placement.all_values(own))  # Also waits until all have theirs.
        self.copies = {**dict(sorted(self.copies.items())[-1:]), name: kept}
        self.bytes_kept = all_here
        return sent

    def _from_island_before(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parts of the island before, in a ring; this island's go to the next one."""
        placement, size = self._placement, self._placement.ranks_per_worker
        me, island = placement.rank, placement.rank // size
        after, before = ((island + step) % self._islands * size for step in (1, -1))
        received: Mapping[str, Any] = {}
        # Island 0 sends first, so there is always one that receives.
        for sends in (True, False) if island % 2 == 0 else (False, True):
            if sends:
                placement.transfer(parts, me, after)
            else:
                received = placement.transfer(None, before, me) or {}
        return received


def _size(parts: Mapping[str, Any]) -> int:
    return num_bytes(list(split_state(dict(parts))[1].values()))
