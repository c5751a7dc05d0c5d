"""The files of a run's folder `gradients`, which keep what `adloco gradients` has measured."""

from pathlib import Path
from typing import Any

from adloco.errors import require
from adloco.run.record_check import is_count, is_number
from adloco.run.records import read_json, write_json

GRADIENTS = "gradients"
"""The folder in a run's folder."""
COUNTS = ("round", "tokens", "trainer", "samples", "batch", "num_batches")
NUMBERS = {
    "total": ("grad_norm_sq", "grad_variance", "noise_scale"),
    "deviation": ("mean", "median", "excess_kurtosis"),
    "cosine": ("mean", "median", "excess_kurtosis"),
}
"""The objects of numbers in a file that the report shows, with the names of the numbers."""
ROWS = {
    "layers": ("noise_scale",),
    "kinds": ("noise_scale",),
    "batches": ("deviation", "cosine"),
}
"""The lists of such objects."""


def write_gradients(run: Path, content: dict[str, Any]) -> Path:
    """Write what `measure_gradients` returns as a file of the run, and return its path."""
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
        fault = _fault(content)
        require(not fault, f"{path} is damaged ({fault}); restore or remove it")
    return found


def check(run: Path) -> None:
    """Raise ValueError if a file is damaged; called before a run resumes."""
    read_gradients(run)


def _fault(content: dict[str, Any]) -> str:
    """The first name in a file whose value is not what it should be; empty if all are."""
    wrong = [name for name in COUNTS if not is_count(content.get(name))]
    wrong += [name for name, names in NUMBERS.items() if not _has(content.get(name), names)]
    for name, names in ROWS.items():
        rows = content.get(name)
        named = name == "batches" or (
            isinstance(rows, list) and all(isinstance(_value(row, "name"), str) for row in rows)
        )
        fits = isinstance(rows, list) and rows and all(_has(row, names) for row in rows)
        wrong += [] if named and fits else [name]
    for name in ("deviation", "cosine"):
        # The picture has lines at both, if it has batches.
        missing = not wrong and None in (content[name]["mean"], content[name]["median"])
        if missing and any(row[name] is not None for row in content["batches"]):
            wrong.append(name)
    return wrong[0] if wrong else ""


def _value(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, dict) else None


def _has(row: Any, names: tuple[str, ...]) -> bool:
    return isinstance(row, dict) and all(is_number(row.get(name, "")) for name in names)
