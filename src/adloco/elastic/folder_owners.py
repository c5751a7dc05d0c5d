"""Finds which islands see the same folder, so that copies go to another disk."""

import uuid
from contextlib import suppress
from pathlib import Path

from adloco.distributed.placement.placement import Placement
from adloco.run.machine_folders import in_turn
from adloco.whole_file import write_text

SEEN = ".seen-"
"""Prefix of files by which islands learn whether they see one folder."""


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
