"""A run folder: the names of its files, and its lock, which one process at a time holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from adloco.errors import require

CHECKPOINTS, MODEL, RECIPE, TOKENIZER = "checkpoints", "model", "recipe.toml", "tokenizer"
SUMMARY, GRADIENTS, LOCK, LOG = "summary.json", "gradients", ".lock", "train.log"


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
