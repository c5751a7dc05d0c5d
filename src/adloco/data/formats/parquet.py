"""parquet files: each record is one row."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from adloco.data.data_file import GONE, BadRow, Columns, Numbered, Row, no_column, not_utf8


@dataclass(frozen=True)
class Parquet:
    """A parquet file: one row per record; only the requested columns are read."""

    file: Path
    text_column: str
    unit = "row"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    @property
    def name(self) -> str:
        return str(self.file)

    def read(self, columns: Columns, start: int) -> Numbered:
        yield from islice(self._records(columns), start, None)

    def _records(self, columns: Columns) -> Numbered:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(
                f"reading {self.file} needs pyarrow; install it with: pip install 'adloco[parquet]'"
            ) from error
        number = 0
        try:
            table = pyarrow.parquet.ParquetFile(self.file)
            present = table.schema_arrow.names
            missing = [column for column in columns if column not in present]
            if missing:
                yield 1, replace(no_column(missing[0], present, self.text_column), rest=True)
                return
            for batch in table.iter_batches(columns=list(columns)):
                for row in _rows(batch):
                    number += 1
                    yield number, row
        except FileNotFoundError:
            yield number + 1, GONE
        except (pyarrow.ArrowException, OSError) as error:
            problem = f" is not a readable parquet file from row {number + 1} on ({error})"
            yield (
                number + 1,
                BadRow(
                    reason="unreadable file", problem=problem, advice="mend or remove it", rest=True
                ),
            )


def _rows(batch: Any) -> Iterator[Row | BadRow]:
    """The rows of a pyarrow.RecordBatch."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # Raised before the first row; only some of them are bad.
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield not_utf8(error)
            except (ValueError, OverflowError) as error:  # A date before the year 1, for instance.
                yield BadRow(
                    reason="unreadable row",
                    problem=f" cannot be read ({error})",
                    advice="mend or remove it",
                )
