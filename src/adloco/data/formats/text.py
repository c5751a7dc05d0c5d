"""Text files: each file is one row."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from adloco.data.data_file import GONE, Columns, Numbered, not_utf8


@dataclass(frozen=True)
class TextFile:
    """A text file, which is one row."""

    file: Path
    text_column: str
    unit = ""
    suffixes: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return str(self.file)

    def read(self, columns: Columns, start: int) -> Numbered:
        if start > 0:
            return
        try:
            yield 1, {self.text_column: self.file.read_bytes().decode("utf-8")}
        except UnicodeDecodeError as error:
            yield 1, not_utf8(error)
        except FileNotFoundError:
            yield 1, GONE
