"""What a source is made of: shards, each read from any of its rows on, and what can be wrong with a
row, a shard or a whole source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Row = dict[str, Any]
Columns = Mapping[str, type]
"""Column -> str for text, int for whole numbers."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row, or the rest of a shard, that cannot be used."""

    reason: str
    """In two or three words; skipped rows are counted by it."""
    problem: str
    """The whole of it, to follow the place at once."""
    advice: str
    rest: bool = False
    """Whether it ends its shard."""


class Shard(Protocol):
    """A file, or one of a dataset's."""

    @property
    def unit(self) -> str:
        """What its rows are numbered as: line, row, or nothing for a file that is one row."""
        ...

    @property
    def name(self) -> str:
        """Its path or address."""
        ...

    def read(self, columns: Columns, start: int) -> Iterator[tuple[int, Row | BadRow]]:
        """Rows from the start-th on, each with its number in the shard as a person counts; other
        columns may come along.
        """
        ...


class SourceUnreachableError(ValueError):
    """A source is not there, or there is no way to it; the one failure for which there is a
    fallback.
    """


def no_column(column: str, present: list[str], text_column: str) -> BadRow:
    """A row or shard without a column that was asked for."""
    advice = (
        f"set data.text_column to one of {present}"
        if column == text_column
        else f"name one of {present}"
    )
    return BadRow(reason="no such column", problem=f" has no column {column!r}", advice=advice)
