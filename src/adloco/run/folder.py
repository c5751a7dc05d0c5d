"""A run folder: its name, those of its files, and its lock, which one process at a time holds."""

import fcntl
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.data.files import reads
from adloco.errors import require
from adloco.run.checkpoint import DAMAGED, list_all, list_checkpoints, name_of
from adloco.whole_file import make_folder

RUNS = "runs"
"""Folder of the runs that are given none."""
CHECKPOINTS, MODEL, RECIPE, TOKENIZER = "checkpoints", "model", "recipe.toml", "tokenizer"
ENVIRONMENT = "environment.json"
PREPARED = (ENVIRONMENT, RECIPE, TOKENIZER, MODEL, CHECKPOINTS)
"""Files and folders that a run writes before its first round."""
SUMMARY, LOCK, LOG = "summary.json", ".lock", "train.log"
NAMES_OF_MODELS = ("model.shape", "model.name", "model.factory", "model.source")
"""The settings that name a model; a source of the user's own may have only the last."""
FROM_PYTHON = " (from Python: adloco.train(resume=...))"
"""Follows the command that resumes a run of which it is not known who began it."""
LONGEST_PART = 24
"""Characters of a recipe's, model's or text's name in a folder's name."""


@contextmanager
def claimed(recipe: Recipe) -> Iterator[Path]:
    """Make the folder of a new run, and hold its lock while the context lasts.

    What a run that was killed before its first checkpoint has left in it is removed, at the
    beginning and at the end.

    Raises:
        ValueError: The folder is in use, has a run or other files in it, or cannot be made.
    """
    with new_folder(recipe) as folder, locked(folder):
        check_free(recipe)  # Another process may have begun a run before it was locked.
        try:
            _clear(folder)
            yield folder
        finally:
            _clear(folder)


@contextmanager
def new_folder(recipe: Recipe) -> Iterator[Path]:
    """Make the folder of a new run: `run.folder`, or runs/RECIPE-MODEL-DATA-TIME.

    The names of one recipe, model and text sort by time, which has microseconds. If the folder was
    made here and is empty when the context ends, it is removed.

    Raises:
        ValueError: The folder has a run or other files in it, or cannot be made.
    """
    check_free(recipe)
    folder = Path(recipe.run.folder or f"{RUNS}/{_name(recipe)}")
    made = not folder.exists()
    try:
        make_folder(folder, exist_ok=bool(recipe.run.folder))
    except OSError as error:
        raise ValueError(
            f"run folder {str(folder)!r} cannot be made ({error.strerror}); use another "
            "--run.folder"
        ) from error
    try:
        yield folder
    finally:
        if made and _is_empty(folder) and not is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _name(recipe: Recipe) -> str:
    """The name of a run's folder in runs/."""
    named = named_settings(recipe)
    model = next(named[key] for key in NAMES_OF_MODELS if key in named)
    parts = map(_safe, (recipe.run.name, model, recipe.data.name))
    return "-".join([*filter(None, parts), f"{datetime.now():%Y%m%d-%H%M%S-%f}"])


def _safe(text: str) -> str:
    """The last part of a path or dotted path, short and in letters that every file system has."""
    last = re.split(r"[/\\:]", text.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last)[:LONGEST_PART].strip("-.")


def check_free(recipe: Recipe) -> None:
    """Raise ValueError if `run.folder` exists and a new run may not use it, or if its files would
    be read as text.

    It may use an empty folder, and one in which a run was killed before its first checkpoint.
    """
    folder = Path(recipe.run.folder or RUNS)
    for data in recipe.data.texts():
        require(
            not reads(data, folder),
            f"{str(folder)!r}, for the run's files, is in {data.source}, and would be read as text "
            "by the next run; give another --run.folder",
        )
    free = not recipe.run.folder or not folder.exists() or _is_empty(folder) or not_begun(folder)
    require(free, _taken(folder))


def _is_empty(folder: Path) -> bool:
    """True if the folder has nothing but a lock in it, and the first file of a run half written."""
    left = {LOCK, f".{ENVIRONMENT}"}
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= left


def not_begun(folder: Path) -> bool:
    """True if a run was prepared in the folder, and killed before its first checkpoint."""
    if not (folder / ENVIRONMENT).is_file():  # The first file of a run.
        return False
    names = {path.name for path in folder.iterdir()}
    checkpoints = folder / CHECKPOINTS
    saved = list_checkpoints(checkpoints) or any(checkpoints.glob(f"{DAMAGED}*"))
    return names <= {*PREPARED, LOCK, f".{RECIPE}"} and not saved


def has_trained(folder: Path) -> bool:
    """True if the folder has parts of a checkpoint of a run that has trained."""
    return any(path.name > name_of(0, 0) for path in list_all(folder / CHECKPOINTS))


def _clear(folder: Path) -> None:
    """Remove what a run that was killed before its first checkpoint has left."""
    if not_begun(folder):
        for name in (CHECKPOINTS, MODEL, TOKENIZER):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (f".{RECIPE}", RECIPE, ENVIRONMENT):
            (folder / name).unlink(missing_ok=True)


def _taken(folder: Path) -> str:
    if not (folder / RECIPE).is_file():
        return f"--run.folder {str(folder)!r} is neither new nor an empty folder; give one that is"
    return (
        f"run folder {str(folder)!r} exists already; use another --run.folder, or resume it by "
        f"{resume_line(folder)}{FROM_PYTHON}"
    )


def resume_line(folder: Path) -> str:
    """The line of a shell that resumes the run in a folder, whatever letters its name has."""
    return f"adloco train --resume {shell_word(folder)}"


def shell_word(path: Path) -> str:
    """A path as a word of a shell, which no command takes for an option."""
    name = str(path)
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def run_folder(folder: Path) -> Path:
    """The folder, after a check that a run lives there; ValueError if none does."""
    require(
        (folder / RECIPE).is_file(),
        f"{str(folder)!r} is not a run folder (no {RECIPE} in it); give one that `adloco train` "
        "wrote",
    )
    return folder


def check_links(folder: Path) -> None:
    """Raise ValueError if a run's folder, or one inside it, has a link in it.

    Files to which a run appends, and folders in which it makes some, would be elsewhere. The
    folder itself may be a link, because whoever names it has chosen it.
    """
    links = [path for level in ("*", "*/*") for path in folder.glob(level) if path.is_symlink()]
    require(
        not links,
        f"run folder {str(folder)!r} has links, through which files elsewhere would be written: "
        f"{', '.join(sorted(path.relative_to(folder).as_posix() for path in links))}; remove them, "
        "or put what they lead to in their place",
    )


def finished(folder: Path) -> Path:
    """The folder, after a check that the run in it has ended; ValueError if it has not."""
    require(
        (folder / SUMMARY).is_file(),
        f"the run in {str(folder)!r} has not ended (no {SUMMARY} in it); "
        + (
            "another process trains it: wait until that has ended"
            if is_locked(folder)
            else f"finish it with: {resume_line(folder)}{FROM_PYTHON}"
        ),
    )
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder while the context lasts.

    Raises:
        ValueError: Another process holds it, or the folder has links in it.
    """
    check_links(folder)
    with lock_held(folder, "run"):
        yield


@contextmanager
def lock_held(folder: Path, whose: str) -> Iterator[None]:
    """Hold the lock of a folder while the context lasts.

    The lock's file stays. If it were removed, a process that had opened it before could lock the
    removed file while another one locks a new file of that name, and both would train the run.

    whose: "run" or "study".

    Raises:
        ValueError: Another process holds it.
    """
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{whose} folder {str(folder)!r} is in use by another process; wait until it has "
            "ended, or end it"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{whose} folder {str(folder)!r} cannot be written ({error.strerror}); make it "
            "writable, or copy it and resume the copy"
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """True if a process holds the folder's lock."""
    try:
        # Read only, because the folder may be.
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
