"""Copies of a run's state in the memory of two islands, so that those that remain after a failure
recover from a round that no disk has (`run.copy_every`); and on the disks of two machines.

After a round, and as it resumes after a failure, each island copies the state of its own workers to
host memory, and sends the copy to the next island on another machine. If one island or machine
fails, the others still have all parts of that round. Where these two islands see different folders,
a checkpoint makes a copy too, which its receiver writes to its disk, so that no machine's disk is
needed to resume.
"""

import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from adloco.distributed.placement.placement import Placement
from adloco.distributed.plain_state import state_bytes
from adloco.run.machine_folders import in_turn
from adloco.whole_file import write_text

SEEN = ".seen-"
"""Prefix of files by which islands learn whether they see one folder."""


class MemoryCopies:
    """The copies that this process keeps: of its own island, and of those that send it theirs. See
    `run.saving.Copies` for what it has in common with others.
    """

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self.for_disk: dict[str, Any] = {}
        self.bytes_kept = 0
        self._every = self._island = 0
        self._islands = self._ranks_per_island = 1
        # Numbers of the placement and not itself, whose process groups must end at a regroup.
        self._receivers: list[int] = []
        """The island to which each one sends its copies."""
        self._folders: list[int] = []

    def place(self, folder: Path, placement: Placement, every: int, resumed: str = "") -> None:
        self.parts = {name: kept for name, kept in self.parts.items() if name == resumed}
        self.for_disk, self.bytes_kept = {}, 0
        self._ranks_per_island = size = placement.ranks_per_worker
        self._islands, self._island = placement.num_ranks // size, placement.rank // size
        self._every = every
        if not self.made:
            return
        self._folders = folder_owners(folder, placement)
        hosts = placement.all_values(socket.gethostname())[::size]
        self._receivers = next_elsewhere(list(zip(hosts, self._folders, strict=True)))

    @property
    def made(self) -> bool:
        return self._every > 0 and self._islands > 1  # One that is alone has nobody to send to.

    @property
    def on_disk(self) -> bool:
        """True if islands write copies of others to their disks."""
        pairs = enumerate(self._receivers)
        return any(self._folders[each] != self._folders[to] for each, to in pairs)

    def due(self, round: int, *, saves: bool, last: bool) -> bool:
        in_memory = round % max(self._every, 1) == 0 and not last
        return self.made and (in_memory or (saves and self.on_disk))

    def keep(self, name: str, parts: Mapping[str, Any], placement: Placement) -> None:
        received = self._exchange(parts, placement) if placement.is_island_first else {}
        kept, self.for_disk = dict(parts), {}
        for island, of_island in received.items():
            kept |= of_island
            if self._folders[island] != self._folders[self._island]:
                self.for_disk |= of_island
        placement.all_values(name)  # Until all have theirs.
        # Those of the time before are kept too: a rank that fails meanwhile can leave the new ones
        # incomplete.
        self.parts = {**dict(sorted(self.parts.items())[-1:]), name: kept}
        self.bytes_kept = state_bytes(kept)

    def _exchange(
        self, parts: Mapping[str, Any], placement: Placement
    ) -> dict[int, Mapping[str, Any]]:
        """Send this island's parts to the one that keeps them; return those received, by island."""
        size, received = self._ranks_per_island, dict[int, Mapping[str, Any]]()
        # All islands go through the transfers in one order, so there is always one that can send.
        for sender in sorted(range(len(self._receivers)), key=lambda island: (island % 2, island)):
            receiver = self._receivers[sender]
            if self._island in (sender, receiver):
                state = placement.transfer(parts, sender * size, receiver * size) or {}
                if self._island == receiver:
                    received[sender] = state
        return received


def folder_owners(folder: Path, placement: Placement) -> list[int]:
    """For each island, the first one that sees the same folder. Called on all ranks."""
    # A name that no machine has looked up before, so no network file system remembers its absence.
    file = folder / f"{SEEN}{placement.agree(uuid.uuid4().hex)}"
    size = placement.ranks_per_worker
    island, seen_by = placement.rank // size, 0

    def look() -> None:
        nonlocal seen_by
        with suppress(OSError):  # Without room for it, a folder counts as that of island 0.
            if not file.exists():
                for left in folder.glob(f"{SEEN}*"):  # By a kill.
                    left.unlink(missing_ok=True)
                write_text(file, str(island))
            seen_by = int(file.read_text())

    in_turn(placement, look)
    found = placement.all_values(seen_by)[::size]
    if placement.is_island_first and seen_by == island:
        file.unlink(missing_ok=True)
    return found


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
