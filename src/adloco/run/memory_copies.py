"""Copies of a run's state in the memory of two islands, so that those that are left after a loss go
on from a round that no disk has (`run.copy_every`); and on the disks of two machines.

After a round each island copies the state of its own workers to host memory, and sends the copy to
the next island on another machine. If one island or machine is lost, the others still have all
parts of that round. Where these two islands see different folders, a checkpoint makes a copy too,
which its receiver writes to its disk, so that no machine's disk is needed to resume.
"""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adloco.distributed.placement.placement import Placement
from adloco.distributed.plain_state import split_state
from adloco.distributed.traffic import num_bytes
from adloco.run.machine_folders import folder_owners

Copies = Mapping[str, Mapping[str, Any]]
"""The parts of a run's state that this process has in memory, by the name of the checkpoint that
they would make, and by part.
"""
NO_COPIES: Copies = {}


class MemoryCopies:
    """The copies that this process keeps: of its own island, and of those that send it theirs."""

    def __init__(self, placement: Placement, every: int) -> None:
        """
        Args:
            placement: The ranks.
            every: Rounds from one copy to the next; 0: none are made.
        """
        self.copies: dict[str, dict[str, Any]] = {}
        self.bytes_kept = 0
        """Bytes of tensors in the newest copies here."""
        self.for_disk: dict[str, Any] = {}
        """The parts in the newest copies here of islands that see another folder."""
        islands = placement.num_ranks // placement.ranks_per_worker
        self._placement = placement
        self._receivers = next_elsewhere([""] * islands)
        self._folders = [0] * islands
        self._every = every
        self._alone = islands == 1

    def place(self, folder: Path) -> None:
        """Choose where copies go. Called on all ranks, once the run's folder is there.

        Until then each island sends to the next one, and none writes another's copy to disk.
        """
        if not self.made:
            return
        size = self._placement.ranks_per_worker
        self._folders = folder_owners(folder, self._placement)
        hosts = self._placement.all_values(socket.gethostname())[::size]
        self._receivers = next_elsewhere(list(zip(hosts, self._folders, strict=True)))

    @property
    def made(self) -> bool:
        """True if this run makes copies."""
        return self._every > 0 and not self._alone

    def needs_disk(self, round: int) -> bool:
        """True if a checkpoint is due after a round, because no other island could keep a copy.

        round: Its number.
        """
        return self._alone and self._every > 0 and round % self._every == 0

    @property
    def on_disk(self) -> bool:
        """True if islands write copies of others to their disks."""
        pairs = enumerate(self._receivers)
        return self.made and any(self._folders[each] != self._folders[to] for each, to in pairs)

    def due(self, round: int, *, saves: bool, last: bool) -> bool:
        """True if copies are to be made after a round.

        Args:
            round: Its number.
            saves: True if a checkpoint is written after it.
            last: True if it is the run's last.
        """
        in_memory = self.made and round % self._every == 0 and not last
        return in_memory or (saves and self.on_disk)

    def keep(self, name: str, parts: Mapping[str, Any]) -> int:
        """Keep the parts of this island, and exchange copies with others.

        Called on all ranks, after a round. Those of the time before are kept too, because a rank
        that is lost meanwhile can leave the new ones incomplete.

        Args:
            name: Name of the checkpoint that the parts would make.
            parts: Those that this process would write; they are not changed any more.

        Returns:
            Bytes of tensors that all islands have sent.
        """
        received = self._exchange(parts) if self._placement.is_island_first else {}
        kept, self.for_disk = dict(parts), {}
        for island, of_island in received.items():
            kept |= of_island
            if self._folders[island] != self._folders[self._island]:
                self.for_disk |= of_island
        own, all_here = _size(parts), _size(kept)
        sent = sum(self._placement.all_values(own))  # Also waits until all have theirs.
        self.copies = {**dict(sorted(self.copies.items())[-1:]), name: kept}
        self.bytes_kept = all_here
        return sent

    @property
    def _island(self) -> int:
        return self._placement.rank // self._placement.ranks_per_worker

    def _exchange(self, parts: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Send this island's parts to the one that keeps them; return those received, by island."""
        size, received = self._placement.ranks_per_worker, dict[int, Mapping[str, Any]]()
        # All islands go through the transfers in one order, so there is always one that goes on.
        for sender in sorted(range(len(self._receivers)), key=lambda island: (island % 2, island)):
            receiver = self._receivers[sender]
            if self._island in (sender, receiver):
                state = self._placement.transfer(parts, sender * size, receiver * size) or {}
                if self._island == receiver:
                    received[sender] = state
        return received


def next_elsewhere(places: Sequence[Any]) -> list[int]:
    """For each island the one to which it sends its copies: at the next place, spread evenly; the
    next island if all are at one place.

    places: Where each island is.
    """
    at = {place: [own for own, where in enumerate(places) if where == place] for place in places}
    if len(at) == 1:
        return [(own + 1) % len(places) for own in range(len(places))]
    order = [*at]
    found = []
    for own, place in enumerate(places):
        there = at[order[(order.index(place) + 1) % len(order)]]
        found.append(there[at[place].index(own) % len(there)])
    return found


def _size(parts: Mapping[str, Any]) -> int:
    return num_bytes(list(split_state(dict(parts))[1].values()))
