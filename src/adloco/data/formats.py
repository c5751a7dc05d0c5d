"""File formats that `data.path` reads: a function for each, in the table `FORMATS`.

The library `datasets`, which reads `data.dataset`, is not used for these files (tried with 5.2):

- It cannot open a jsonl file with one broken line at all, and stops reading at one bad byte or half
  a surrogate pair, where the readers here leave out one line.
- None of its errors names a line.
- It turns "\\r\\n" in a text into "\\n".
- Each of its readers leaves lock files in the home folder of a user who asked for no cache.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from adloco.data.data_file import GONE, BadRow, Columns, Numbered, Row, no_column, not_utf8

RowsOf = Callable[[Path, Columns, str], Numbered]
"""(file, columns, data.text_column) -> its numbered rows."""


def text_rows(file: Path, columns: Columns, text_column: str) -> Numbered:
    """One row: the whole text of the file."""
    try:
        yield 1, {text_column: file.read_bytes().decode("utf-8")}
    except UnicodeDecodeError as error:
        yield 1, not_utf8(error)
    except FileNotFoundError:
        yield 1, GONE


def json_rows(file: Path, columns: Columns, text_column: str) -> Numbered:
    """One row for each line that is not blank, numbered by its line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_row(line)
    except FileNotFoundError:
        yield 1, GONE


def _json_row(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except (ValueError, RecursionError) as error:  # Also too many digits, or nested too deeply.
        reason = getattr(error, "msg", str(error).partition(";")[0])
        return BadRow(
            reason="not JSON", problem=f" is not JSON ({reason})", advice="mend or remove the line"
        )
    return row if isinstance(row, dict) else {}


def parquet_rows(file: Path, columns: Columns, text_column: str) -> Numbered:
    """One row for each record; only the requested columns are read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"reading {file} needs pyarrow; install it with: pip install 'adloco[parquet]'"
        ) from error
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        present = table.schema_arrow.names
        missing = [column for column in columns if column not in present]
        if missing:
            yield 1, replace(no_column(missing[0], present, text_column), rest=True)
            return
        for batch in table.iter_batches(columns=list(columns)):
            for row in _records(batch):
                number += 1
                yield number, row
    except FileNotFoundError:
        yield number + 1, GONE
    except (pyarrow.ArrowException, OSError) as error:
        problem = f" is not a readable parquet file from row {number + 1} on ({error})"
        advice = "mend or remove it"
        bad = BadRow(reason="unreadable file", problem=problem, advice=advice, rest=True)
        yield number + 1, bad


def _records(batch: Any) -> Iterator[Row | BadRow]:
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


FORMATS: dict[str, tuple[str, RowsOf]] = {
    ".jsonl": ("line", json_rows),
    ".ndjson": ("line", json_rows),
    ".parquet": ("row", parquet_rows),
}
"""Suffix -> the word before a row's number in messages, and the reader. Other files are text."""
