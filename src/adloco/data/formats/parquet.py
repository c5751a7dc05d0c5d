"""parquet files: each record is one row."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from adloco.data.data_file import GONE, BadRow, Columns, Numbered, no_column


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
                for row in batch.to_pylist():
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
