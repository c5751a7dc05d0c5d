"""Rows from a function of the user's own, which `data.factory` names by a dotted path."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from adloco.data.data_file import BadRow, Columns, DataFile, Numbered
from adloco.data.data_settings import DataSettings
from adloco.dotted_path import load_object
from adloco.errors import require


def own_rows(data: DataSettings) -> DataFile:
    """The rows that the function gives, in its order. It is called again for each read."""

    def read(columns: Columns, start: int) -> Numbered:
        for number, item in islice(enumerate(_items(data), start=1), start, None):
            row = {data.text_column: item} if isinstance(item, str) else item
            yield (
                number,
                row
                if isinstance(row, dict)
                else BadRow(
                    reason="not a row",
                    problem=f" is neither a text nor a dictionary but {type(row).__name__}",
                    advice="mend the function",
                ),
            )

    return DataFile(name=data.source, read=read)


def _items(data: DataSettings) -> Iterable[Any]:
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
