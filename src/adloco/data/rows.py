"""Rows of a source by split: which data files they come from, which are held out, how many are
taken, and what becomes of bad ones.

Rows are numbered from the source's first, bad ones included. All that is decided about a row
follows from its number, so that reading may begin anywhere. With a validation split, two splits of
the source are read; without one, rows of the one split are held out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from adloco.data.data_file import BadRow, Columns, DataFile, Row
from adloco.data.data_settings import DataSettings
from adloco.data.files import data_files
from adloco.data.hub import dataset_files
from adloco.data.own_rows import OwnRows
from adloco.data.standard_library import StandardLibrary

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass over a split of the source."""

    source_split: str
    limit: int
    """Rows to take; 0: all."""
    split_of: Callable[[int], Split]
    """Row number -> the split that the row belongs to."""


def stages(data: DataSettings) -> list[Stage]:
    """The passes that give all rows of both splits; a validation split of its own comes first."""
    if data.validation_split:
        return [
            Stage(
                source_split=data.validation_split,
                limit=data.validation_samples,
                split_of=lambda row: "validation",
            ),
            Stage(source_split=data.split, limit=data.samples, split_of=lambda row: "train"),
        ]
    every, first = round(1 / data.validation_fraction), data.validation_samples

    def split_of(row: int) -> Split:
        held_out = row < first if first else row % every == every - 1
        return "validation" if held_out else "train"

    return [Stage(source_split=data.split, limit=data.samples, split_of=split_of)]


def read_rows(data: DataSettings, split: Split, columns: Columns, start: int = 0) -> "SplitRows":
    """The rows of a split, without those among the first `start` rows of the source.

    Args:
        data: Names the source.
        split: "train" or "validation".
        columns: Columns to keep, and their types.
        start: Rows of the source to pass over, bad and held-out ones included.
    """
    stage = stages(data)[-1 if split == "train" else 0]
    return SplitRows(
        rows=open_rows(data, stage, columns, Position(), start),
        split=split,
        split_of=stage.split_of,
    )


@dataclass(kw_only=True)
class Position:
    """The row at which reading goes on."""

    row: int = 0
    """Number of the next row, from 0, over all files."""
    file_rows: list[int] = field(default_factory=list)
    """Number of rows of each file that was read to its end; none of these is opened again."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many rows were left out so far, by reason."""


def open_rows(
    data: DataSettings, stage: Stage, columns: Columns, position: Position, start: int = 0
) -> "Rows":
    """The rows of a stage from a position on, without the first `start` of the stage."""
    if data.dataset:
        files = dataset_files(data, stage.source_split)
    elif data.factory:
        files = [OwnRows(data)]
    elif data.path:
        files = data_files(Path(data.path).expanduser(), data.text_column)
    else:
        files = [StandardLibrary(data.text_column)]
    return Rows(
        files=files, columns=columns, data=data, limit=stage.limit, position=position, start=start
    )


@dataclass(kw_only=True)
class Rows:
    """Iterates over (number, row), with None for a row left out; `position` follows the reading."""

    files: Sequence[DataFile]
    columns: Columns
    data: DataSettings
    limit: int
    position: Position
    start: int

    def __iter__(self) -> Iterator[tuple[int, Row | None]]:
        at = self.position
        begin = sum(at.file_rows)
        for file in self.files[len(at.file_rows) :]:
            if self._enough():
                return
            for number, item in file.read(self.columns, at.row - begin):
                where = (
                    f"{file.name} {file.unit} {number}"
                    if file.unit and not (isinstance(item, BadRow) and item.rest)
                    else file.name
                )
                row = self._kept(item, where) if at.row >= self.start else None
                at.row += 1
                if isinstance(item, BadRow) and item.rest:
                    break
                yield at.row - 1, row
                if self._enough():
                    return
            at.file_rows.append(at.row - begin)
            begin = at.row

    def _enough(self) -> bool:
        return 0 < self.limit <= self.position.row

    def _kept(self, item: Row | BadRow, where: str) -> Row | None:
        """The columns asked for, or None for a row that the recipe leaves out."""
        bad = (
            item
            if isinstance(item, BadRow)
            else next(filter(None, (self._fault(item, column) for column in self.columns)), None)
        )
        if bad is None:
            return (
                {column: item[column] for column in self.columns}
                if isinstance(item, dict)
                else None
            )
        if self.data.bad_rows == "error":
            raise ValueError(
                f"{where}{bad.problem}; {bad.advice}, or leave such rows out with data.bad_rows "
                "skip"
            )
        self.position.skipped[
            f"{bad.reason}: {where}{bad.problem}" if bad.rest else bad.reason
        ] += 1
        return None

    def _fault(self, row: Row, column: str) -> BadRow | None:
        value, kind = row.get(column), self.columns[column]
        if kind is str and (value is None or (isinstance(value, str) and not value.strip())):
            return BadRow(
                reason=f"empty {column}",
                problem=f" holds no text in column {column!r}",
                advice="fill or remove it",
            )
        if type(value) is not kind:
            problem = f": column {column!r} is not {NAMES[kind]} but {type(value).__name__}"
            return BadRow(
                reason=f"{column} is not {NAMES[kind]}",
                problem=problem,
                advice="name a column that is",
            )
        return _half_pair(value) if isinstance(value, str) else None


def _half_pair(text: str) -> BadRow | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f" holds half a surrogate pair at character {error.start}, which is no text"
        return BadRow(reason="half a surrogate pair", problem=problem, advice="mend or remove it")
    return None


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """Iterates over the rows of one split, without bad ones."""

    rows: Rows
    split: Split
    split_of: Callable[[int], Split]

    def __iter__(self) -> Iterator[Row]:
        return (
            row
            for number, row in self.rows
            if row is not None and self.split_of(number) == self.split
        )

    @property
    def skipped(self) -> Counter[str]:
        """How many rows of the source were left out so far, by reason."""
        return self.rows.position.skipped


def left_out(counts: Mapping[str, int], rows: int) -> str:
    """A sentence that counts the rows left out by reason; empty if there are none.

    Args:
        counts: Reason -> rows left out.
        rows: Rows that were read, those left out included.
    """
    reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items()))
    return (
        f"{sum(counts.values())} of {rows} rows were left out, as data.bad_rows says ({reasons})"
        if counts
        else ""
    )


NAMES = {str: "text", int: "a whole number"}
