"""Data files, and what can be wrong with a row, a data file or a whole source.

A source is a list of data files. Reading a data file can begin at any of its rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, type]
"""Column name -> type of its values: str for text, int for whole numbers."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row, or the rest of a data file, that cannot be used."""

    reason: str
    """The defect in two or three words. Skipped rows are counted by reason."""
    problem: str
    """End of an error message that begins with file and row; it begins with a space or a colon."""
    advice: str
    """Remedy, as a clause of an error message."""
    rest: bool = False
    """True if nothing of the data file can be read from this row on."""


Numbered = Iterator[tuple[int, Row | BadRow]]
"""(number, row) pairs; numbers count from 1 and appear in error messages."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of rows, or a part of a dataset that is read like one."""

    name: str
    """Path or address of the file, for messages."""
    unit: str = "row"
    """Word before a row's number in messages; empty if the file is one row."""
    read: Callable[[Columns, int], Numbered]
    """(columns that each row must have, rows to skip, bad ones included) -> the rows after them.
    Rows may have more columns; a column that is missing in a single row is found by the caller.
    """


class SourceUnreachableError(ValueError):
    """A source does not exist or cannot be reached."""


def no_column(column: str, present: list[str], text_column: str) -> BadRow:
    """The defect of a row or data file that has other columns, and not this one."""
    advice = f"{'set data.text_column to' if column == text_column else 'name'} one of {present}"
    return BadRow(reason="no such column", problem=f" has no column {column!r}", advice=advice)


GONE = BadRow(
    reason="vanished file",
    problem=" is gone, though it was there when reading began",
    advice="restore it",
    rest=True,
)


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """The defect of a row whose bytes are not UTF-8."""
    return BadRow(
        reason="not UTF-8",
        problem=f" is not UTF-8 text (byte {error.start})",
        advice="convert it, for instance with iconv, or leave it out",
    )
