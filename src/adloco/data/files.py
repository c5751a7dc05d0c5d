"""The data files at a path, each with the reader for its suffix."""

import os
from itertools import islice
from pathlib import Path

from adloco.data.data_file import Columns, DataFile, Numbered, SourceUnreachableError
from adloco.data.formats import FORMATS, text_rows
from adloco.errors import require


def expanded(path: str) -> Path:
    """The path, with ~ or ~user at its beginning replaced by a home folder.

    Raises:
        ValueError: There is no such user.
    """
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
    """The file at a path, or all files in a folder and its subfolders, sorted by path.

    A file whose suffix has no format is read as text.

    Raises:
        SourceUnreachableError: The path does not exist.
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
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [_data_file(file, text_column) for file in files]


def _data_file(file: Path, text_column: str) -> DataFile:
    unit, rows = FORMATS.get(file.suffix.lower(), ("", text_rows))

    def read(columns: Columns, start: int) -> Numbered:
        return islice(rows(file, columns, text_column), start, None)

    return DataFile(name=str(file), unit=unit, read=read)
