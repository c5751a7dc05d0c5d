"""The files of a run's folder `gradients`, which keep what `adloco gradients` has measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from adloco.errors import require
from adloco.run.folder import check_links
from adloco.run.json_files import read_json, write_json
from adloco.run.record_types import Count, Number, Text, fault

GRADIENTS = "gradients"
"""The folder in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class _Total:
    grad_norm_sq: Number | None
    grad_variance: Number | None
    noise_scale: Number | None


@dataclass(frozen=True, kw_only=True)
class _Distribution:
    mean: Number | None
    median: Number | None
    excess_kurtosis: Number | None


@dataclass(frozen=True, kw_only=True)
class _Part:
    name: Text
    noise_scale: Number | None


@dataclass(frozen=True, kw_only=True)
class _Batch:
    deviation: Number | None
    cosine: Number | None


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
    deviation: _Distribution
    cosine: _Distribution
    layers: Annotated[list[_Part], Field(min_length=1)]
    kinds: Annotated[list[_Part], Field(min_length=1)]
    batches: Annotated[list[_Batch], Field(min_length=1)]


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
        wrong = _fault(content)
        require(not wrong, f"{path} is damaged ({wrong}); restore or remove it")
    return found


def check(run: Path) -> None:
    """Raise ValueError if a file is damaged; called before a run resumes."""
    read_gradients(run)


def _fault(content: dict[str, Any]) -> str:
    """The first name in a file whose value is not what it should be; empty if all are."""
    wrong = fault(content, _Content)
    for name in ("deviation", "cosine"):
        # The picture has lines at both, if it has batches.
        missing = not wrong and None in (content[name]["mean"], content[name]["median"])
        if missing and any(row[name] is not None for row in content["batches"]):
            return name
    return wrong
