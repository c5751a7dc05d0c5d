"""Placeholder until the data branch lands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adloco.training.settings import DataSettings


def read_rows(data: DataSettings, split: Any, columns: Sequence[str], start: int = 0) -> Iterator[Mapping[str, Any]]:
    """Rows."""
    raise NotImplementedError
