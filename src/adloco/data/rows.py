"""Rows of a source by split: which data files they come from, which are held out, how many are
taken, and what becomes of bad ones.

Rows are numbered from the first row of a split of the source, bad rows included. Whether a row is
taken or held out depends only on its number, so reading can begin anywhere. With a
data.validation_split, two splits of the source are read; without one, some rows of data.split are
held out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from adloco.data.data_file import (
    BadRow,
    Columns,
    DataFile,
    Numbered,
    Row,
    SourceUnreachableError,
    no_column,
)
from adloco.data.data_settings import DataSettings
from adloco.data.files import data_files, expanded, own_rows, standard_library
from adloco.data.hub import dataset_files

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass over a split of the source."""

    source_split: str
    limit: int
    """Rows to take; 0: all."""
    split_of: Callable[[int], Split]
    """Row number -> "train" or "validation"."""


def stages(data: DataSettings) -> list[Stage]:
    """The passes over the source that give all rows to train and to validate on.

    A data.validation_split is read before data.split.
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
    first, spread = data.validation_samples, spread_over_rows(data.validation_fraction)

    def split_of(row: int) -> Split:
        held_out = row < first if first else spread(row)
        return "validation" if held_out else "train"

    return [Stage(source_split=data.split, limit=data.samples, split_of=split_of)]


def spread_over_rows(fraction: float) -> Callable[[int], bool]:
    """A predicate of rows to hold out: of the first n they are floor(n fraction), for every n.

    0.05 holds out the rows 19, 39, ...; 0.3 holds out 3, 6, 9, 13, ....
    """
    # The decimal number that the user wrote, because 0.3 in binary is a little less than 3 / 10.
    above, below = Fraction(str(fraction)).as_integer_ratio()
    return lambda row: (row + 1) * above // below > row * above // below


@dataclass(kw_only=True)
class Position:
    """Place where reading continues in a stage, and counts of what it left out so far."""

    row: int = 0
    """Number of the next row, from 0, over all files."""
    files: int = 0
    """Files that were read to their end; they are not opened again."""
    rows_of_files: int = 0
    """Rows of these files."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of rows left out so far."""


def open_rows(data: DataSettings, stage: Stage, columns: Columns, position: Position) -> "Rows":
    """The rows of a stage with these columns, from a position on, which moves as they are read."""
    if data.dataset:
        files = dataset_files(data, stage.source_split)
    elif data.factory:
        files = [own_rows(data)]
    elif data.path:
        files = data_files(expanded(data.path), data.text_column)
    else:
        files = [standard_library(data.text_column)]
    return Rows(files=files, columns=columns, data=data, limit=stage.limit, position=position)


@dataclass(kw_only=True)
class Rows:
    """Iterable of (row number, row); a row that is left out is None. Iterating moves `position`."""

    files: Sequence[DataFile]
    columns: Columns
    data: DataSettings
    limit: int
    position: Position

    def __iter__(self) -> Iterator[tuple[int, Row | None]]:
        at = self.position
        for file in self.files[at.files :]:
            if self._enough():
                return
            for number, item in self._read(file, at.row - at.rows_of_files):
                ends = isinstance(item, BadRow) and item.rest
                numbered = file.unit and not ends
                where = f"{file.name} {file.unit} {number}" if numbered else file.name
                row = self._kept(item, where)
                at.row += 1
                if ends:
                    break
                yield at.row - 1, row
                if self._enough():
                    return
            at.files, at.rows_of_files = at.files + 1, at.row

    def _read(self, file: DataFile, start: int) -> Numbered:
        """The rows of a file. A failure of the disk is no bad row: it may be gone next time."""
        try:
            yield from file.read(self.columns, start)
        except OSError as error:
            raise SourceUnreachableError(
                f"{file.name} cannot be read ({error.strerror or error}); mend or remove it"
            ) from error

    def _enough(self) -> bool:
        return 0 < self.limit <= self.position.row

    def _kept(self, item: Row | BadRow, where: str) -> Row | None:
        """The requested columns of a row; None for a bad row that is skipped."""
        if isinstance(item, BadRow):
            bad = item
        else:
            found = filter(None, (self._fault(item, column) for column in self.columns))
            if (fault := next(found, None)) is None:
                return {column: item[column] for column in self.columns}
            bad = fault
        if self.data.bad_rows == "error":
            raise ValueError(
                f"{where}{bad.problem}; {bad.advice}, or leave such rows out with data.bad_rows "
                "skip"
            )
        reason = f"{bad.reason}: {where}{bad.problem}" if bad.rest else bad.reason
        self.position.skipped[reason] += 1
        return None

    def _fault(self, row: Row, column: str) -> BadRow | None:
        if column not in row:
            return no_column(column, list(row), self.data.text_column)
        value, kind = row[column], self.columns[column]
        if kind is str and (value is None or (isinstance(value, str) and not value.strip())):
            return BadRow(
                reason=f"empty {column}",
                problem=f" holds no text in column {column!r}",
                advice="fill or remove it",
            )
        if type(value) is not kind:
            reason = f"{column} is not {NAMES[kind]}"
            problem = f": column {column!r} is not {NAMES[kind]} but {type(value).__name__}"
            return BadRow(reason=reason, problem=problem, advice="name a column that is")
        if isinstance(value, int) and not 0 <= value < MOST_CLASSES:
            return BadRow(
                reason=f"{column} is no class",
                problem=f": column {column!r} must hold whole numbers from 0 to "
                f"{MOST_CLASSES - 1:,}, got {value if abs(value) < 2**63 else 'a larger one'}",
                advice="name a column that does",
            )
        return half_pair(value) if isinstance(value, str) else None


def half_pair(text: str) -> BadRow | None:
    """The defect of a text that holds half a surrogate pair; None if it holds none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f" holds half a surrogate pair at character {error.start}, which is no text"
        return BadRow(reason="half a surrogate pair", problem=problem, advice="mend or remove it")
    return None


def left_out(counts: Mapping[str, int], rows: int) -> str:
    """A sentence that counts the rows left out, by reason; empty if there are none.

    Args:
        counts: Reason -> number of rows left out.
        rows: Number of rows that were read, including those left out.
    """
    if not counts:
        return ""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values())} of {rows} rows were left out, as data.bad_rows says ({reasons})"


MOST_CLASSES = 1 << 16
"""Classes are numbered below this; a larger number is a mistake, and would make as many classes."""
NAMES = {str: "text", int: "a whole number"}
