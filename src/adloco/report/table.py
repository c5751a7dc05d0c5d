"""Tables for a page, for the terminal and for programs."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Of = TypeVar("Of")


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    detail: str = ""
    """A second, smaller line."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with its heading and what the reader should know of it."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[Cell]]

    @property
    def words(self) -> list[bool]:
        """True for each column that holds words, which may be wrapped, and no numbers."""
        firsts = [cell.text[:1] for cell in self.rows[0]] if self.rows else self.columns
        return [not (first.isdigit() or first in "+-") for first in firsts]


def table_of(
    title: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Table:
    """A table of plain values, shown as text.

    note: A sentence under the heading; empty for none.
    """
    cells = [[Cell(str(value)) for value in row] for row in rows]
    return Table(title=title, note=note, columns=list(columns), rows=cells)


def table_by(
    title: str, note: str, columns: Mapping[str, Callable[[Of], object]], each: Iterable[Of]
) -> Table:
    """A table with a row for each of the things: what every column shows of it."""
    rows = [[show(one) for show in columns.values()] for one in each]
    return table_of(title, note, list(columns), rows)


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """The rows as CSV, below the names of their columns."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([columns, *rows])
    return out.getvalue()
