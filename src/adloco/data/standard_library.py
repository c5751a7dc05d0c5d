"""The default corpus: the source of Python's own standard library."""

import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from adloco.data.data_file import Columns, DataFile, Numbered

NOT_LIBRARY = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
"""Folders left out of the default corpus: tests differ between distributions, packages between
machines.
"""


def standard_library(text_column: str) -> DataFile:
    """The source of Python's own standard library: one row per file."""

    def read(columns: Columns, start: int) -> Numbered:
        for number, text in islice(enumerate(library_texts(), start=1), start, None):
            yield number, {text_column: text}

    return DataFile(name="the default corpus", unit="file", read=read)


def library_texts() -> Iterator[str]:
    """The texts of the library's files, without empty or repeated ones."""
    seen: set[str] = set()
    for path in sorted(_files(), key=Path.as_posix):
        text = path.read_bytes().decode("utf-8", errors="replace")
        if "\ufffd" not in text and text not in seen and text.strip():
            seen.add(text)
            yield text


def _files() -> Iterator[Path]:
    """The library's files. Other folders are not searched: packages can have many files."""
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = set(inside) - NOT_LIBRARY
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
