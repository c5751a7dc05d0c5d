"""The data files at a path, each with the reader for its suffix."""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Protocol

from adloco.data import formats
from adloco.data.data_file import DataFile, SourceUnreachableError
from adloco.data.formats.text import TextFile
from adloco.errors import require


class Format(Protocol):
    """Reader of a file format: a class in the folder `formats`."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files, in lower case."""
        ...

    def __call__(self, file: Path, text_column: str) -> DataFile: ...


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
    return [_formats().get(file.suffix.lower(), TextFile)(file, text_column) for file in files]


@cache
def _formats() -> dict[str, Format]:
    """Suffix -> format, for all classes with `suffixes` in the modules of the folder."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(formats.__path__):
        name = f"{formats.__name__}.{module.name}"
        for kind in vars(importlib.import_module(name)).values():
            # Skip imported classes: pathlib's Path has `suffixes` too.
            if getattr(kind, "__module__", "") == name:
                found |= dict.fromkeys(getattr(kind, "suffixes", ()), kind)
    return found
