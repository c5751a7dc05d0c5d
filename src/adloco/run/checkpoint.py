"""The checkpoints of a run: folders with the parts of its state.

Every island writes the parts of its own workers (`part_file.py`) into the folder as it sees it. On
a shared file system they meet in one folder; without one, each machine has its own parts. A
checkpoint is complete if all parts are there that its part `run` lists. A kill can leave a folder
that is not.

Each save has an identity of its own, which stands in all of its parts. Parts of different saves,
after files were copied by hand, for instance, do not make a checkpoint.
"""

import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from adloco.algorithms.state_parts import RUN
from adloco.errors import require
from adloco.metrics import Record
from adloco.rules.outcome import islands_in, of_newest_text
from adloco.run.part_file import CHECKSUMS, DamagedCheckpointError, read_part

DAMAGED = "damaged-"
"""Prefix of damaged checkpoints that a resume has set aside."""

SAVE = "save"
"""The key in each part of the identity of the save that wrote it."""


def foreign(part: str, state: Any, run: Any) -> str:
    """Error text if another save than that of the part `run` wrote a part; else empty."""
    return f"{part} is of another save than {RUN}" if state[SAVE] != run[SAVE] else ""


def need(checkpoint: Path, part: str) -> Any:
    """Read a part; DamagedCheckpointError if it is not here, or not of this checkpoint."""
    state = read_part(checkpoint, part)
    if state is None:
        raise DamagedCheckpointError(checkpoint, f"{part} is missing")
    wrong = part != RUN and foreign(part, state, need(checkpoint, RUN))
    if wrong:
        raise DamagedCheckpointError(checkpoint, wrong)
    return state


def name_of(round: int, inner_steps: int) -> str:
    """The name of a checkpoint after so many complete rounds and inner steps, those of a round in
    progress included; names sort by age.
    """
    return f"round-{round:06d}-step-{inner_steps:08d}"


def remove_old(folder: Path, newest: str, keep: int, spared: str = "") -> None:
    """Remove all checkpoints but the newest, which is complete, `keep` - 1 before it, and the one
    that is spared.
    """
    before = [path for path in list_all(folder) if path.name < newest]
    for old in before[: max(0, len(before) - keep + 1)]:
        if old.name != spared:
            shutil.rmtree(old, ignore_errors=True)


def losses_of(records: Iterable[Record]) -> dict[str, float]:
    """The validation loss of each round that was evaluated, by the name of its checkpoint, of those
    on the newest one's text (`of_newest_text`).
    """
    return {
        name_of(each["round"], each["inner_steps"]): each["val_loss"]
        for each in of_newest_text(records)
        if math.isfinite(each["val_loss"])
    }


def best_name(names: Collection[str], losses: Mapping[str, float]) -> str:
    """The checkpoint with the lowest of these losses, the first of equals; empty if none has one.

    losses: From `losses_of`.
    """
    return min(losses.keys() & {*names}, key=lambda name: (losses[name], name), default="")


def list_all(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first, with damaged and incomplete ones."""
    return sorted(path for path in folder.glob("round-*") if path.is_dir())


def newest_round(folder: Path) -> int:
    """The round of the newest checkpoint in a folder, complete or not; 0 if there is none."""
    return max((round_of(path) for path in list_all(folder)), default=0)


def round_of(checkpoint: Path) -> int:
    """The round of a checkpoint."""
    return int(checkpoint.name.split("-")[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder that have their last part, `run`, oldest first."""
    return [path for path in list_all(folder) if (path / f"{RUN}{CHECKSUMS}").exists()]


def newest(folder: Path) -> Path:
    """The newest checkpoint in a folder; ValueError if it has none."""
    found = list_checkpoints(folder)
    require(bool(found), f"{folder} has no checkpoint; start the run again in another folder")
    return found[-1]


def best(folder: Path, records: Iterable[Record]) -> Path:
    """The checkpoint in a folder with the lowest validation loss; ValueError if none has one."""
    name = best_name([path.name for path in list_checkpoints(folder)], losses_of(records))
    require(
        bool(name),
        f"{folder} has no checkpoint of a round that was evaluated; train with run.keep_best, or "
        "leave out --best",
    )
    return folder / name


def of_round(folder: Path, round: int) -> Path:
    """The newest checkpoint of a round in a folder; ValueError if none is kept."""
    newest(folder)  # Which says if there is none at all.
    all_kept = list_checkpoints(folder)
    found = [path for path in all_kept if round_of(path) == round]
    kept = ", ".join(map(str, sorted({*map(round_of, all_kept)})))
    require(
        bool(found),
        f"{folder} has no checkpoint of round {round}; those of rounds {kept} are kept "
        "(run.keep_checkpoints, run.checkpoint_every)",
    )
    return found[-1]


class BestRound:
    """Knows the losses of the rounds that have checkpoints, and the lowest of all rounds."""

    def __init__(self) -> None:
        self._losses: dict[str, float] = {}
        self._lowest = math.inf
        self._islands = 0

    def add(self, records: Iterable[Record]) -> bool:
        """Take the next lines of metrics.jsonl; True if one has the lowest loss so far."""
        alike = of_newest_text(records)
        if alike and islands_in(alike[-1]) != self._islands:
            self._islands, self._losses, self._lowest = islands_in(alike[-1]), {}, math.inf
        found = losses_of(alike)
        before, self._lowest = self._lowest, min([self._lowest, *found.values()])
        self._losses |= found
        return self._lowest < before

    def spared(self, names: Collection[str]) -> str:
        """The one of these checkpoints that stays; empty if none of them was evaluated."""
        return best_name(names, self._losses)
