"""Rows of a source by split: which shards they come from, which are held out, how many are taken,
and what becomes of bad ones.

Rows are numbered from the source's first, bad ones included, and all that is decided about a row
follows from its number: so reading may begin anywhere. With a validation split two splits of the
source are read; without one, rows of the one split are held out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from adloco.data.data_settings import DataSettings
from adloco.data.files import StandardLibrary, file_shards
from adloco.data.hub import dataset_shards
from adloco.data.row_groups import BadRow, Columns, Row, Shard

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass over a split of the source."""

    source_split: str
    limit: int
    """Rows to take; 0: all."""
    split_of: Callable[[int], Split]
    """What the row of a number is for."""


def stages(data: DataSettings) -> list[Stage]:
    """The passes that give all rows of both splits; what validates comes first, where it is a split
    of its own.
    """
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
    """The rows of a split with these columns (and their types), from the start-th row of the source
    on.
    """
    stage = stages(data)[-1 if split == "train" else 0]
    return SplitRows(
        rows=open_rows(data, stage, columns, Position(), start),
        split=split,
        split_of=stage.split_of,
    )


@dataclass(kw_only=True)
class Position:
    """Where reading stands: at a row of the first shard that was not read to its end."""

    row: int = 0
    """The next row."""
    shard_rows: list[int] = field(default_factory=list)
    """Rows of the shards that were read to their ends, so that none of them is opened again."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many rows were left out so far, by reason."""


def open_rows(
    data: DataSettings, stage: Stage, columns: Columns, position: Position, start: int = 0
) -> "Rows":
    """The rows of a stage from a position on; those before the start-th are passed over unseen."""
    if data.dataset:
        shards = dataset_shards(data, stage.source_split)
    elif data.path:
        shards = file_shards(Path(data.path).expanduser(), data.text_column)
    else:
        shards = [StandardLibrary(data.text_column)]
    return Rows(
        shards=shards, columns=columns, data=data, limit=stage.limit, position=position, start=start
    )


@dataclass(kw_only=True)
class Rows:
    """Iterates over (number, row), with None for rows that were left out; `position` moves along."""

    shards: Sequence[Shard]
    columns: Columns
    data: DataSettings
    limit: int
    position: Position
    start: int

    def __iter__(self) -> Iterator[tuple[int, Row | None]]:
        at = self.position
        begin = sum(at.shard_rows)
        for shard in self.shards[len(at.shard_rows) :]:
            if self._enough():
                return
            for number, item in shard.read(self.columns, at.row - begin):
                where = (
                    f"{shard.name} {shard.unit} {number}"
                    if shard.unit and not (isinstance(item, BadRow) and item.rest)
                    else shard.name
                )
                row = self._kept(item, where) if at.row >= self.start else None
                at.row += 1
                if isinstance(item, BadRow) and item.rest:
                    break
                yield at.row - 1, row
                if self._enough():
                    return
            at.shard_rows.append(at.row - begin)
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
                f"{where}{bad.problem}; {bad.advice}, or leave such rows out with data.bad_rows skip"
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
    """Iterates over the rows of one split that are not left out."""

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
    """One sentence about rows that were left out, by reason, of so many; empty if none were."""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items()))
    return (
        f"{sum(counts.values())} of {rows} rows were left out, as data.bad_rows says ({reasons})"
        if counts
        else ""
    )


NAMES = {str: "text", int: "a whole number"}
