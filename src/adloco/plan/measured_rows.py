"""Measurements in CSV files: rounds that a calibration fits, and those that it predicts."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adloco.errors import require
from adloco.whole_file import write_text

Group = tuple[str, float, float]
"""(method, workers, parameters): what must be equal for rows to share constants."""
KEYS = ("method", "workers", "parameters", "sync_every", "bandwidth_bits_per_second")
Measure = Literal["compute_utilisation", "round_seconds"]
MEASURES: tuple[Measure, ...] = ("compute_utilisation", "round_seconds")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A round of some method on some links."""

    group: Group
    sync_every: float
    """H: inner steps of a round."""
    bits_per_second: float
    """Bandwidth of the links between workers."""
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a file."""

    rows: Sequence[Row]
    measure: Measure
    """Meaning of `Row.value`. compute_utilisation: compute seconds of a round over all its seconds;
    round_seconds: seconds of a round.
    """
    cells: Sequence[dict[str, str]]
    """The rows as they stand in the file."""


def read_rows(path: Path, *, measured: bool) -> Rows:
    """Read a CSV file with a header; ValueError if a column is missing or a value is wrong.

    measured: True if each row must have a measurement.
    """
    require(path.is_file(), f"there is no file {str(path)!r}; name a CSV file with measurements")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        cells = list(reader)
    lacking = [name for name in KEYS if name not in names]
    require(
        not lacking,
        f"{path} must have the columns {', '.join(KEYS)}; it lacks {', '.join(lacking)}",
    )
    require(bool(cells), f"{path} has no rows below its header; give measurements")
    found = [name for name in MEASURES if name in names]
    require(
        bool(found) or not measured,
        f"{path} must have the columns {', '.join(KEYS)} and {' or '.join(MEASURES)}; it lacks "
        f"{' and '.join(MEASURES)}",
    )
    measure = found[0] if found else MEASURES[0]
    rows = [
        Row(
            group=(
                (cell["method"] or "").strip(),
                _number(path, line, cell, "workers"),
                _number(path, line, cell, "parameters"),
            ),
            sync_every=_number(path, line, cell, "sync_every"),
            bits_per_second=_number(path, line, cell, "bandwidth_bits_per_second"),
            value=_number(path, line, cell, measure) if measured else None,
        )
        for line, cell in enumerate(cells, start=2)
    ]
    if measured and measure == "compute_utilisation":
        for line, row in enumerate(rows, start=2):
            require(
                (row.value or 0) <= 1,
                f"{path} line {line}: compute_utilisation must be > 0 and <= 1, got {row.value}",
            )
    return Rows(rows=rows, measure=measure, cells=cells)


def write_rows(path: Path, rows: Rows, utilisations: Sequence[float]) -> None:
    """Write the rows with compute_utilisation filled in; the file appears whole or not at all."""
    # Cells beyond the header have no name.
    names = [*dict.fromkeys([*filter(None, rows.cells[0]), "compute_utilisation"])]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell, utilisation in zip(rows.cells, utilisations, strict=True):
        writer.writerow(cell | {"compute_utilisation": f"{utilisation:.6g}"})
    write_text(path, text.getvalue())


def _number(path: Path, line: int, cell: dict[str, str], name: str) -> float:
    text = (cell[name] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    require(
        math.isfinite(value) and value > 0,
        f"{path} line {line}: {name} must be a number > 0, got {text!r}",
    )
    return value
