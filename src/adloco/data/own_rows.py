"""Rows from a function of the user's own, which `data.factory` names by a dotted path."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from adloco.data.data_file import BadRow, Columns, Numbered, Row, no_column
from adloco.data.data_settings import DataSettings
from adloco.dotted_path import load_object
from adloco.errors import require


@dataclass(frozen=True)
class OwnRows:
    """The rows that the function gives, in its order. The function is called anew for each read."""

    data: DataSettings
    unit = "row"

    @property
    def name(self) -> str:
        return self.data.source

    def read(self, columns: Columns, start: int) -> Numbered:
        for number, item in islice(enumerate(self._items(), start=1), start, None):
            yield number, self._row(item, columns)

    def _items(self) -> Iterable[Any]:
        data = self.data
        function = load_object(data.factory)
        require(callable(function), f"{data.source} must be a function, got {function!r}")
        try:
            yield from function(**data.arguments)
        except Exception as error:  # The user's own code, which may raise anything.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"{data.source} failed when it was called with {dict(data.arguments)} ({reason}); "
                "it must return an iterable of texts or of rows, which are dictionaries"
            ) from error

    def _row(self, item: Any, columns: Columns) -> Row | BadRow:
        row = {self.data.text_column: item} if isinstance(item, str) else item
        if not isinstance(row, dict):
            return BadRow(
                reason="not a row",
                problem=f" is neither a text nor a dictionary but {type(row).__name__}",
                advice="mend the function",
            )
        missing = [column for column in columns if column not in row]
        return no_column(missing[0], list(row), self.data.text_column) if missing else row
