"""The part of a run's page for `adloco gradients`: a table of all files, and their pictures."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adloco.lab.gradients.records import read_gradients
from adloco.report.html import embedded
from adloco.report.table import Table, table_by

NOTE = (
    "F is the mean gradient of all these samples, g that of a batch of them. S is the variance of "
    "single samples' gradients and |G|² the squared norm of the true gradient, both estimated "
    "without bias. Distance and cosine are those of g and F."
)


def content(run: Path) -> tuple[list[Table], list[dict[str, str]]]:
    """The table and the pictures of the files in a run's folder `gradients`; none without files.

    The pictures are drawn again.
    """
    measured = read_gradients(run)
    if not measured:
        return [], []
    from adloco.lab.gradients.picture import draw_gradients  # Late, for matplotlib.

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "round": lambda each: f"{each['round']:,}",
        "tokens": lambda each: f"{each['tokens']:,}",
        "trainer": lambda each: str(each["trainer"]),
        "samples": lambda each: f"{each['samples']:,}",
        "batch": lambda each: f"{each['batch']:,}",
        "|G|²": lambda each: _shown(each["total"]["grad_norm_sq"]),
        "S": lambda each: _shown(each["total"]["grad_variance"]),
        "noise scale": lambda each: _shown(each["total"]["noise_scale"]),
        "distance (median)": lambda each: _shown(each["deviation"]["median"]),
        "its excess kurtosis": lambda each: _shown(each["deviation"]["excess_kurtosis"]),
        "cosine (median)": lambda each: _shown(each["cosine"]["median"]),
    }
    pictures = (draw_gradients(each, path.with_suffix(".png")) for path, each in measured.items())
    return [table_by("Gradients", NOTE, columns, measured.values())], [
        embedded(it) for it in pictures
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}"
