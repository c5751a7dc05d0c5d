"""A run folder: its name, those of its files, and its lock, which one process at a time holds."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.errors import require

CHECKPOINTS, MODEL, RECIPE, TOKENIZER = "checkpoints", "model", "recipe.toml", "tokenizer"
SUMMARY, GRADIENTS, LOCK, LOG = "summary.json", "gradients", ".lock", "train.log"
NAMES_OF_MODELS = ("model.shape", "model.name", "model.factory", "model.source")
"""The settings that name a model; a source of the user's own may have only the last."""
TIME = "%Y%m%d-%H%M%S-%f"
LONGEST_PART = 24
"""Characters of a recipe's, model's or text's name in a folder's name."""


def new_folder(recipe: Recipe) -> Path:
    """The folder of a new run: `run.folder`, or runs/RECIPE-MODEL-DATA-TIME.

    The time has microseconds, so that runs which start together have folders of their own. The
    names of one recipe, model and text sort by time.
    """
    if recipe.run.folder:
        return Path(recipe.run.folder)
    named = named_settings(recipe)
    model = next(named[key] for key in NAMES_OF_MODELS if key in named)
    parts = [recipe.run.name, model, recipe.data.name]
    return Path("runs", "-".join([*filter(None, map(_safe, parts)), f"{datetime.now():{TIME}}"]))


def _safe(text: str) -> str:
    """The last part of a path or dotted path, short and in letters that every file system has."""
    last = re.split(r"[/\\:]", text.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last)[:LONGEST_PART].strip("-.")


def run_folder(folder: Path) -> Path:
    """The folder, after a check that a run lives there.

    Raises:
        ValueError: No run does.
    """
    require(
        (folder / RECIPE).is_file(),
        f"{str(folder)!r} is not a run folder (no {RECIPE} in it); give one that `adloco train` "
        "wrote",
    )
    return folder


def finished(folder: Path) -> Path:
    """The folder, after a check that the run in it has ended.

    Raises:
        ValueError: It has not.
    """
    require(
        (folder / SUMMARY).is_file(),
        f"the run in {str(folder)!r} has not ended (no {SUMMARY} in it); finish it with: adloco "
        f"train --resume {folder}",
    )
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while the context lasts.

    Raises:
        ValueError: Another process holds it.
    """
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"run folder {str(folder)!r} is in use by another process; wait until it has ended, or "
            "end it"
        ) from error
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """True if a process holds the folder's lock."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except Timeout:
        return True
