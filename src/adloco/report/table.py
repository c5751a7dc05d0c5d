"""Tables for a page and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def table_of(
    title: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> Table:
    """A table of plain values.

    Args:
        title: Its heading.
        note: A sentence under the heading; empty for none.
        columns: Their names.
        rows: The values of each row, shown as text.
    """
    cells = [[Cell(str(value)) for value in row] for row in rows]
    return Table(title=title, note=note, columns=list(columns), rows=cells)
