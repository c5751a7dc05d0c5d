"""The lock of a run folder, which one process at a time trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


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
