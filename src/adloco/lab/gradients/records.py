"""The files of a run's folder `gradients`, which keep what `adloco gradients` has measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.errors import require
from adloco.run.folder import check_links
from adloco.run.json_files import read_json, write_json
from adloco.run.record_types import Count, Number, fault

GRADIENTS = "gradients"
"""The folder in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class _Total:
    grad_norm_sq: Number | None
    grad_variance: Number | None
    noise_scale: Number | None


@dataclass(frozen=True, kw_only=True)
class _Content:
    """Values from a file that the report shows."""

    round: Count
    tokens: Count
    trainer: Count
    samples: Count
    batch: Count
    num_batches: Count
    total: _Total


def write_gradients(run: Path, content: dict[str, Any]) -> Path:
    """Write what `measure_gradients` returns as a file of the run, and return its path."""
    check_links(run)
    folder = run / GRADIENTS
    folder.mkdir(exist_ok=True)
    path = folder / f"round-{content['round']:06d}-trainer-{content['trainer']}.json"
    write_json(path, content)
    return path


def read_gradients(run: Path) -> dict[Path, dict[str, Any]]:
    """The content of every such file of a run by its path, the earliest round first.

    Raises:
        ValueError: A file is damaged.
    """
    found = {path: read_json(path) for path in sorted(run.glob(f"{GRADIENTS}/*.json"))}
    for path, content in found.items():
        wrong = fault(content, _Content)
        require(not wrong, f"{path} is damaged ({wrong}); restore or remove it")
    return found


def check(run: Path) -> None:
    """Raise ValueError if a file is damaged; called before a run resumes."""
    read_gradients(run)


def cut(run: Path, rounds: int) -> None:
    """Remove the files of all rounds after this many; their checkpoints count no longer."""
    for path in run.glob(f"{GRADIENTS}/round-*.json"):
        number = path.name.split("-")[1]
        if number.isdecimal() and int(number) > rounds:  # Others are a person's own copies.
            path.unlink()
