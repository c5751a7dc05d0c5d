"""Overview of a folder's runs, read from their files without opening a checkpoint."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from adloco.config.settings import RunSettings
from adloco.rules.outcome import ended_finite
from adloco.run.budget import part_used
from adloco.run.folder import CHECKPOINTS, RECIPE, SUMMARY, is_locked
from adloco.run.json_files import read_json
from adloco.run.records import METRICS, Records
from adloco.run.starts import read_starts


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run, in short."""

    folder: Path
    recipe: str
    state: str
    """finished, running, stopped with the part of its budget that is used, or damaged."""
    tokens: int
    loss: float | None
    """The newest validation loss; None if there is none, or it was not finite."""
    bytes_communicated: int
    interruptions: int | None
    """Number of times that training failed or was thrown back; None if it is not known."""
    changed: float
    """Time at which its metrics last grew, in seconds since 1970."""


def find_runs(folder: Path) -> list[RunOverview]:
    """The runs in a folder and below it, those that changed last at the end."""
    recipes = (path for path in folder.rglob(RECIPE) if path.is_file())  # Pipes are waited for.
    found = [_overview(path.parent) for path in recipes if (path.parent / CHECKPOINTS).is_dir()]
    return sorted(found, key=lambda run: (run.changed, run.folder))


def _overview(folder: Path) -> RunOverview:
    try:
        records, damaged = Records(folder).read_whole(), False
    except ValueError:
        records, damaged = [], True
    last = records[-1] if records else {}
    losses = [record["val_loss"] for record in records if record.get("val_loss") is not None]
    try:
        settings = dict(tomllib.loads((folder / RECIPE).read_bytes().decode("utf-8"))["run"])
    except (ValueError, LookupError, TypeError, RecursionError):
        settings, damaged = {}, True
    grown = folder / METRICS if records else folder / RECIPE
    found = {name: settings.get(name, 0) for name in RunSettings().limits}
    limits = {name: limit for name, limit in found.items() if isinstance(limit, int)}
    return RunOverview(
        folder=folder,
        recipe=str(settings.get("name", "?")),
        state="damaged" if damaged else _state(folder, part_used(limits, last)),
        tokens=int(last.get("tokens", 0)),
        loss=losses[-1] if losses and ended_finite(records) else None,
        bytes_communicated=int(last.get("bytes_communicated", 0)),
        interruptions=_interruptions(folder),
        changed=grown.stat().st_mtime,
    )


def _interruptions(folder: Path) -> int | None:
    try:
        return sum(start.interrupted for start in read_starts(folder))
    except (ValueError, OSError):
        return None


def _state(folder: Path, part: float) -> str:
    if is_locked(folder):
        return "running"
    if not (folder / SUMMARY).is_file():
        return f"stopped at {part:.0%}"
    try:
        read_json(folder / SUMMARY)
    except (ValueError, OSError):
        return "damaged"
    return "finished"
