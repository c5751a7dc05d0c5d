"""The run's folder on machines that share no file system: each has its own, of the same path.

What a machine's folder has already stays.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.messages import all_states, broadcast_state
from adloco.distributed.placement.placement import Placement
from adloco.metrics import Record
from adloco.run.checkpoint import list_all
from adloco.run.folder import CHECKPOINTS, ENVIRONMENT, MODEL, RECIPE, TOKENIZER
from adloco.run.records import Records
from adloco.whole_file import make_folder, write_bytes


def in_turn(placement: Placement, act: Callable[[], None]) -> None:
    """Call a function on the first rank of each island, one after another, on rank 0 first.

    Called on all ranks, so that islands that share a folder are not in each other's way.
    """
    for first in range(0, placement.num_ranks, placement.ranks_per_worker):
        if placement.rank == first:
            act()
        placement.any(False)  # Waits for all ranks.


def check_machine(folder: Path, recipe: str) -> str:
    """A sentence that says that a machine's folder has another run in it; empty if it has not.

    recipe: The recipe that rank 0 has written into its folder.
    """
    file = folder / RECIPE
    other = file.is_file() and file.read_text() != recipe
    if not (other or list_all(folder / CHECKPOINTS)):
        return ""
    return (
        f"run folder {str(folder)!r} has another run on {socket.gethostname()}; remove it there, "
        "or use another --run.folder"
    )


def fetch_folder(folder: Path) -> None:
    """Give ranks that do not see the run's recipe what describes the run in another's folder.

    Called on all ranks, before the run is read.
    """
    lacking = all_states(not (folder / RECIPE).is_file())
    if all(lacking) or not any(lacking):
        return
    giver = lacking.index(False)
    files = broadcast_state(_description(folder) if this_rank() == giver else {}, giver)
    for rank in [rank for rank, lacks in enumerate(lacking) if lacks]:
        # One after another, because some of them may see the same folder.
        if this_rank() == rank and not (folder / RECIPE).is_file():
            for name, content in files.items():
                make_folder((folder / name).parent)
                write_bytes(folder / name, content.numpy().tobytes())
        broadcast_state(None, rank)


def fetch_records(
    records: Records, digests: Mapping[str, Sequence[Any]], rounds: int, placement: Placement
) -> None:
    """Give rank 0 the lines of records up to this round that it lacks and another machine has,
    where rank 0 was before. Called on all ranks.

    digests: Of the records at the checkpoint from which the run resumes. A machine that has these
        lines was rank 0's then, and rank 0 may have others, which were trained again.
    """
    # Usually rank 0 has all, and the other ranks need not read their files.
    if not placement.agree(placement.is_rank_zero and _unchanged(records, digests)):
        written = placement.all_values(_unchanged(records, digests))
        if True in written:
            everything = dict.fromkeys(digests, range(1, rounds + 1))
            _send(records, everything, written.index(True), placement)
    for rank in range(1, placement.num_ranks):
        gone = placement.agree(records.gone(rounds) if placement.is_rank_zero else {})
        if not any(gone.values()):
            return
        _send(records, gone, rank, placement)


def _unchanged(records: Records, digests: Mapping[str, Sequence[Any]]) -> bool:
    try:
        return records.unchanged(digests)
    except ValueError:  # A line is damaged; rank 0 has looked at its own.
        return False


def _send(
    records: Records, rounds: Mapping[str, Sequence[int]], sender: int, placement: Placement
) -> None:
    """Give rank 0 the lines of these rounds that another rank sees."""
    if placement.rank not in (0, sender):
        return
    found: dict[str, list[Record]] = {}
    if placement.rank == sender:
        with suppress(ValueError):
            found = records.of_rounds(rounds)
    sent = placement.transfer(found, sender, 0)
    if placement.is_rank_zero:
        records.insert(sent or {})


def _description(folder: Path) -> dict[str, torch.Tensor]:
    """Bytes of the files that describe a run, by their path in its folder; its recipe is last."""
    below = [path for name in (MODEL, TOKENIZER) for path in sorted((folder / name).rglob("*"))]
    files = [*below, folder / ENVIRONMENT, folder / RECIPE]
    return {
        file.relative_to(folder).as_posix(): torch.frombuffer(
            bytearray(file.read_bytes()), dtype=torch.uint8
        )
        for file in files
        if file.is_file() and file.stat().st_size
    }
