"""A source is a list of data files, each of which is read from any of its rows on. This module says
what a data file is, and what can be wrong with a row, a data file or a whole source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Row = dict[str, Any]
Columns = Mapping[str, type]
"""Column -> str for text, int for whole numbers."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row, or the rest of a data file, that cannot be used."""

    reason: str
    """What is wrong, in two or three words; skipped rows are counted by it."""
    problem: str
    """What is wrong, as the sentence that follows the name of the place without a space."""
    advice: str
    """What to do about it."""
    rest: bool = False
    """True if nothing of the data file can be read from this row on."""


Numbered = Iterator[tuple[int, Row | BadRow]]
"""Rows with their numbers in the file, as a person counts: the first has the number 1."""


class DataFile(Protocol):
    """A file of rows, or a part of a dataset that is read like one."""

    @property
    def unit(self) -> str:
        """The word before a row's number: line or row; empty if the file is one row."""
        ...

    @property
    def name(self) -> str:
        """Its path or address."""
        ...

    def read(self, columns: Columns, start: int) -> Numbered:
        """The rows after the first `start` ones; they may have more columns than these."""
        ...


class SourceUnreachableError(ValueError):
    """A source does not exist or cannot be reached; only then data.fallback is used."""


def no_column(column: str, present: list[str], text_column: str) -> BadRow:
    """What is wrong with a row or a data file that lacks a column."""
    advice = (
        f"set data.text_column to one of {present}"
        if column == text_column
        else f"name one of {present}"
    )
    return BadRow(reason="no such column", problem=f" has no column {column!r}", advice=advice)


GONE = BadRow(
    reason="vanished file",
    problem=" is gone, though it was there when reading began",
    advice="restore it",
    rest=True,
)


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """What is wrong with a row whose bytes are not UTF-8."""
    return BadRow(
        reason="not UTF-8",
        problem=f" is not UTF-8 text (byte {error.start})",
        advice="convert it, for instance with iconv, or leave it out",
    )
