"""Rows from files: a text file is one row, jsonl and parquet have one per line or record; and the
default corpus, Python's standard library.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from adloco.data.row_groups import BadRow, Columns, Row, Shard, SourceUnreachableError, no_column

NOT_LIBRARY = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
"""Folders left out of the default corpus: tests differ between distributions, packages between
machines.
"""
Numbered = Iterator[tuple[int, Row | BadRow]]


def file_shards(path: Path, text_column: str) -> list[Shard]:
    """The files at a path, by suffix; of a folder all, sorted."""
    if not path.exists():
        raise SourceUnreachableError(
            f"data.path {str(path)!r} does not exist; give a text file, a folder, or jsonl/parquet"
        )
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [SHARDS.get(file.suffix.lower(), TextFile)(file, text_column) for file in files]


@dataclass(frozen=True)
class TextFile:
    """One row: the whole file."""

    file: Path
    text_column: str
    unit = ""

    @property
    def name(self) -> str:
        return str(self.file)

    def read(self, columns: Columns, start: int) -> Numbered:
        if start > 0:
            return
        try:
            yield 1, {self.text_column: self.file.read_bytes().decode("utf-8")}
        except UnicodeDecodeError as error:
            yield 1, _not_utf8(error)
        except FileNotFoundError:
            yield 1, GONE


@dataclass(frozen=True)
class JsonLines:
    """One row per line that is not blank."""

    file: Path
    text_column: str
    unit = "line"

    @property
    def name(self) -> str:
        return str(self.file)

    def read(self, columns: Columns, start: int) -> Numbered:
        yield from islice(self._lines(columns), start, None)

    def _lines(self, columns: Columns) -> Numbered:
        try:
            with self.file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, self._row(line, columns)
        except FileNotFoundError:
            yield 1, GONE

    def _row(self, line: bytes, columns: Columns) -> Row | BadRow:
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return _not_utf8(error)
        except json.JSONDecodeError as error:
            return BadRow(
                reason="not JSON",
                problem=f" is not JSON ({error.msg})",
                advice="mend or remove the line",
            )
        present = list(row) if isinstance(row, dict) else []
        missing = [column for column in columns if column not in present]
        return no_column(missing[0], present, self.text_column) if missing else row


@dataclass(frozen=True)
class Parquet:
    """One row per record; only the columns asked for are read."""

    file: Path
    text_column: str
    unit = "row"

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


class StandardLibrary:
    """The source of Python's own standard library: one row per file, each text once, empty ones
    left out.
    """

    unit = "file"
    name = "the default corpus"

    def __init__(self, text_column: str) -> None:
        self.text_column = text_column

    def read(self, columns: Columns, start: int) -> Numbered:
        for number, text in enumerate(islice(self._texts(), start, None), start=start + 1):
            yield number, {self.text_column: text}

    def _texts(self) -> Iterator[str]:
        root = Path(sysconfig.get_path("stdlib"))
        seen: set[str] = set()
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            if NOT_LIBRARY.intersection(path.relative_to(root).parts):
                continue
            text = path.read_bytes().decode("utf-8", errors="replace")
            if "\ufffd" not in text and text not in seen and text.strip():
                seen.add(text)
                yield text


GONE = BadRow(
    reason="vanished file",
    problem=" is gone, though it was there when reading began",
    advice="restore it",
    rest=True,
)


def _not_utf8(error: UnicodeDecodeError) -> BadRow:
    problem = f" is not UTF-8 text (byte {error.start})"
    return BadRow(
        reason="not UTF-8",
        problem=problem,
        advice="convert it, for instance with iconv, or leave it out",
    )


SHARDS: dict[str, type[JsonLines] | type[Parquet]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": Parquet,
}
