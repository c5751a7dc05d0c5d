"""The part of a run's page for `adloco gradients`: a table of all files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adloco.lab.gradients.records import read_gradients
from adloco.report.table import Table, table_by

NOTE = (
    "S is the variance of single samples' gradients and |G|² the squared norm of the true "
    "gradient, both estimated without bias from the gradients of batches of these samples; with "
    "too few samples to tell |G|² from zero it may be negative, and there is no noise scale."
)


def content(run: Path) -> list[Table]:
    """The table of the files in a run's folder `gradients`; none without files."""
    measured = read_gradients(run)
    if not measured:
        return []
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "round": lambda each: f"{each['round']:,}",
        "tokens": lambda each: f"{each['tokens']:,}",
        "trainer": lambda each: str(each["trainer"]),
        "samples": lambda each: f"{each['samples']:,}",
        "batch": lambda each: f"{each['batch']:,}",
        "|G|²": lambda each: _shown(each["total"]["grad_norm_sq"]),
        "S": lambda each: _shown(each["total"]["grad_variance"]),
        "noise scale": lambda each: _shown(each["total"]["noise_scale"]),
    }
    return [table_by("Gradients", NOTE, columns, measured.values())]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}"
