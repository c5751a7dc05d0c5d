"""jsonl files: each line is one row."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from adloco.data.data_file import GONE, BadRow, Columns, Numbered, Row, no_column, not_utf8


@dataclass(frozen=True)
class JsonLines:
    """A jsonl file: one row per line that is not blank."""

    file: Path
    text_column: str
    unit = "line"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

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
            return not_utf8(error)
        except json.JSONDecodeError as error:
            return _not_json(error.msg)
        except (ValueError, RecursionError) as error:  # Too many digits, or nested too deeply.
            return _not_json(str(error).partition(";")[0])
        present = list(row) if isinstance(row, dict) else []
        missing = [column for column in columns if column not in present]
        return no_column(missing[0], present, self.text_column) if missing else row


def _not_json(reason: str) -> BadRow:
    return BadRow(
        reason="not JSON", problem=f" is not JSON ({reason})", advice="mend or remove the line"
    )
