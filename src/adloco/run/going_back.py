"""Takes a stopped run back to an earlier round, from which it is then resumed."""

import shutil
from pathlib import Path

from adloco.algorithms.state_parts import RUN
from adloco.errors import require
from adloco.run.changes import cut_changes
from adloco.run.checkpoint import list_all, list_checkpoints, need, of_round, round_of
from adloco.run.folder import CHECKPOINTS, SUMMARY, locked, run_folder
from adloco.run.part_file import CHECKSUMS, read_part
from adloco.run.records import Records
from adloco.run.starts import STARTS, Point, Starts

UNDONE = "undone-"
"""Prefix of checkpoints that are newer than the round to which a run went back."""


def go_back(folder: Path, round: int) -> list[str]:
    """Set aside the checkpoints after a round, and cut the run's records there.

    The checkpoints keep their contents under another name. Settings that were changed since stay
    as they are in the recipe; a resume with them records them anew.

    Returns:
        The new names of the checkpoints set aside, oldest first.

    Raises:
        ValueError: The run has no good checkpoint of the round, is at it already, or trains.
    """
    checkpoints = run_folder(folder) / CHECKPOINTS
    with locked(folder):
        target = _target(checkpoints, round)
        newer = [path for path in list_all(checkpoints) if path.name > target.name]
        require(bool(newer), f"the run in {str(folder)!r} is at round {round} already")
        _check(target)
        for path in newer:
            aside = path.with_name(UNDONE + path.name)
            shutil.rmtree(aside, ignore_errors=True)  # Of an earlier return.
            path.replace(aside)
        records = Records(folder)
        reached = Point.of(records.newest())
        records.cut(round)
        cut_changes(folder, round)
        if (folder / STARTS).exists():  # Only where rank 0 lives.
            Starts(folder, writes=True).add("rewind", Point.of(records.newest()), reached)
        (folder / SUMMARY).unlink(missing_ok=True)  # The run has not ended any more.
    return [UNDONE + path.name for path in newer]


def _target(checkpoints: Path, round: int) -> Path:
    """The newest checkpoint of the round. A machine without rank 0 has no part `run` of any."""
    found = [path for path in list_all(checkpoints) if round_of(path) == round]
    whole = list_checkpoints(checkpoints)
    if whole and (not found or {*found} & {*whole}):
        return of_round(checkpoints, round)  # Which says what there is.
    require(bool(found), f"{checkpoints} has no part of a checkpoint of round {round}")
    return found[-1]


def _check(checkpoint: Path) -> None:
    """Raise ValueError if a part that is here is damaged, or of another save."""
    whole = (checkpoint / f"{RUN}{CHECKSUMS}").exists()
    for file in checkpoint.glob(f"*{CHECKSUMS}"):
        (need if whole else read_part)(checkpoint, file.name.removesuffix(CHECKSUMS))
