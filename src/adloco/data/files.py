"""The data files at a path, each with the reader for its suffix; and the two sources that are read
like one: the default corpus, which is the source of Python's own standard library, and a function
of the user's own.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from adloco.data.data_file import BadRow, Columns, DataFile, Numbered, SourceUnreachableError
from adloco.data.data_settings import DataSettings
from adloco.data.formats import FORMATS, text_rows
from adloco.dotted_path import load_object
from adloco.errors import require

TABLES = (".json", ".csv", ".tsv")
"""Suffixes of files that hold rows, in forms that are not read."""


def expanded(path: str) -> Path:
    """The path, with ~ or ~user replaced by a home folder; ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"the home folder that {path!r} begins with is not known; write the whole path"
        ) from error


def cache_folder(path: str) -> Path:
    """The folder of the caches for a value of data.cache.

    The standard of XDG_CACHE_HOME says that a path that is not absolute is no value.
    """
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return expanded(path or f"{shared if Path(shared).is_absolute() else '~/.cache'}/adloco")


def data_files(path: Path, text_column: str) -> list[DataFile]:
    """The files at a path, as `files_at` finds them; one whose suffix has no format is a text."""
    return [_data_file(file, text_column) for file in files_at(path)]


def files_at(path: Path) -> list[Path]:
    """The file at a path, or all files in a folder and its subfolders, sorted by path. Names that
    begin with a dot are left out, because other programs keep their notes there, and lost+found, a
    file system's own folder that only root can list.

    Raises:
        SourceUnreachableError: The path does not exist, or a folder cannot be read.
    """
    if not path.exists():
        raise SourceUnreachableError(
            f"data.path {str(path)!r} does not exist; give a text file, a folder, or "
            "jsonl/parquet (data.dataset names a dataset of the Hugging Face hub)"
        )
    require(
        path.is_file() or path.is_dir(),
        f"data.path {str(path)!r} is a device or a pipe, which has no end or is read only once; "
        "give a text file, a folder, or jsonl/parquet",
    )
    files = sorted(_files_below(path)) if path.is_dir() else [path]
    require(
        files != [path] or path.suffix.lower() not in TABLES,
        f"data.path {str(path)!r} would be read as one text; name it .jsonl if each line is a JSON "
        "object, or .txt if it is a text, or convert it to jsonl or parquet",
    )
    return files


def reads(data: DataSettings, folder: Path) -> bool:
    """True if a folder is in that of the source, and not left out as `files_at` says."""
    root, folder = expanded(data.path or data.dataset).resolve(), folder.resolve()
    if not (data.path or data.dataset) or not folder.is_relative_to(root):
        return False
    inside = folder.relative_to(root).parts
    return bool(data.dataset) or not any(part.startswith(".") for part in inside)


def _files_below(folder: Path) -> Iterator[Path]:
    """The files below a folder, through links too; a link to nothing is one, and so a bad row."""
    seen, waiting = set[Path](), [folder]
    for top in waiting:  # A folder has its own path, and that of a link only without one.
        for inside, folders, names in os.walk(top, onerror=_unreadable):
            if (real := Path(inside).resolve()) in seen:  # Twice, or in a circle.
                folders.clear()
                continue
            seen.add(real)
            inner = {*folders} - {"lost+found"}
            folders[:] = sorted(name for name in inner if not name.startswith("."))
            waiting += (link for name in folders if (link := Path(inside, name)).is_symlink())
            files = (Path(inside, name) for name in names if not name.startswith("."))
            yield from (file for file in files if file.is_file() or file.is_symlink())


def _unreadable(error: OSError) -> None:
    """Refuse a folder that cannot be listed, whose files would be left out unseen."""
    raise SourceUnreachableError(
        f"folder {str(error.filename)!r} of data.path cannot be read ({error.strerror}); make it "
        "readable, or give another path"
    ) from error


def _data_file(file: Path, text_column: str) -> DataFile:
    unit, rows = FORMATS.get(file.suffix.lower(), ("", text_rows))

    def read(columns: Columns, start: int) -> Numbered:
        return islice(rows(file, columns, text_column), start, None)

    return DataFile(name=str(file), unit=unit, read=read)


LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_LIBRARY = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
"""Folders that are left out: tests differ between distributions, packages between machines."""


def standard_library(text_column: str) -> DataFile:
    """The source of Python's own standard library: one row per file."""

    def read(columns: Columns, start: int) -> Numbered:
        for number, text in islice(enumerate(library_texts(), start=1), start, None):
            yield number, {text_column: text}

    return DataFile(name="the default corpus", unit="file", read=read)


def library_texts() -> Iterator[str]:
    """The texts of the library's files, without empty or repeated ones."""
    seen: set[str] = set()
    for path in sorted(library_files(), key=Path.as_posix):
        text = path.read_bytes().decode("utf-8", errors="replace")
        if "\ufffd" not in text and text not in seen and text.strip():
            seen.add(text)
            yield text


def library_files() -> Iterator[Path]:
    """The library's files. Other folders are not searched: packages can have many files."""
    for folder, inside, names in os.walk(LIBRARY):
        inside[:] = set(inside) - NOT_LIBRARY
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def own_rows(data: DataSettings) -> DataFile:
    """The rows that the function gives, in its order. It is called again for each read."""

    def read(columns: Columns, start: int) -> Numbered:
        for number, item in islice(enumerate(_items(data), start=1), start, None):
            row = {data.text_column: item} if isinstance(item, str) else item
            if not isinstance(row, dict):
                problem = f" is neither a text nor a dictionary but {type(row).__name__}"
                row = BadRow(reason="not a row", problem=problem, advice="mend the function")
            yield number, row

    return DataFile(name=data.source, read=read)


def _items(data: DataSettings) -> Iterable[Any]:
    function = load_object(data.factory)
    require(callable(function), f"{data.source} must be a function, got {function!r}")
    try:
        yield from function(**data.arguments)
    except Exception as error:  # The user's own code, which may raise anything.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{data.source} failed when it was called with {dict(data.arguments)} ({reason}); "
            "it must return an iterable of texts or of rows, which are dictionaries"
        ) from error
