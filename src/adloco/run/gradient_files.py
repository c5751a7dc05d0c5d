"""The files of a run's folder `gradients`, which keep what `adloco gradients` has measured."""

from pathlib import Path
from typing import Any

from adloco.run.folder import GRADIENTS
from adloco.run.records import read_json, write_json


def write_gradients(run: Path, content: dict[str, Any]) -> Path:
    """Write what `measure_gradients` returns as a file of the run, and return its path."""
    folder = run / GRADIENTS
    folder.mkdir(exist_ok=True)
    path = folder / f"round-{content['round']:06d}-trainer-{content['trainer']}.json"
    write_json(path, content)
    return path


def read_gradients(run: Path) -> dict[Path, dict[str, Any]]:
    """The content of every such file of a run by its path, the earliest round first."""
    return {path: read_json(path) for path in sorted(run.glob(f"{GRADIENTS}/*.json"))}
