"""All texts of a source, as a token store asks for them, and all rows of one split."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from adloco.data.data_file import Columns, Row
from adloco.data.data_settings import DataSettings
from adloco.data.feeds import chunks_after
from adloco.data.rows import Position, Rows, Split, open_rows, stages
from adloco.data.token_store import State


@dataclass
class Read:
    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    rows: int = 0


def read_all(data: DataSettings) -> Read:
    read = Read()
    for chunk in chunks_after(data, State(source="", dtype="uint16")):
        read.train += chunk.texts["train"]
        read.validation += chunk.texts["validation"]
        read.skipped, read.rows = chunk.after["skipped"], chunk.after["rows"]
    return read


class SplitRows:
    """Iterable of the rows of one split, without bad rows."""

    def __init__(self, data: DataSettings, split: Split, columns: Columns) -> None:
        self._stage, self._split = stages(data)[-1 if split == "train" else 0], split
        self._rows: Rows = open_rows(data, self._stage, columns, Position())

    def __iter__(self) -> Iterator[Row]:
        return (
            row
            for number, row in self._rows
            if row is not None and self._stage.split_of(number) == self._split
        )

    @property
    def skipped(self) -> Counter[str]:
        """Reason -> number of bad rows of the source left out so far."""
        return self._rows.position.skipped
