"""Interactive curves for a page: plotly.js, packed into the page so that it opens offline, and the
numbers that it draws (templates/curves.html).
"""

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from adloco.metrics import Metric

Look = Literal["line", "strong", "grey", "thin", "points"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a picture: its numbers on every axis, and every measure."""

    name: str
    """Shown in the legend; curves of one name share a colour and are toggled together."""
    detail: str
    """Shown beside the pointer, for instance the seed."""
    axes: Mapping[str, Sequence[float]]
    """Name of an axis -> values. The line is shown only on the axes that it has."""
    measures: Mapping[str, Sequence[float | None]]
    look: Look = "line"
    """line: a colour of its name's own; strong: the colour of text; thin: as `line`, but thin and
    under the others; points: as `line`, but not joined."""
    notes: Sequence[str] = ()
    """Shown beside the pointer, one for each point; empty for none."""


def curve_content(
    axes: Mapping[str, Metric],
    measures: Sequence[Metric],
    curves: Sequence[Curve],
    caption: str,
    *,
    log: bool = False,
) -> dict[str, Any]:
    """What templates/curves.html needs.

    Args:
        axes: Choices for x by their names in `Curve.axes`.
        measures: Choices for y; the first is shown at first.
        curves: The lines.
        caption: A sentence under the picture.
        log: Both axes are logarithmic at first.
    """

    def choice(name: str, metric: Metric) -> dict[str, Any]:
        return {"name": name, "label": metric.axis, "scale": metric.unit.scale}

    return {
        "plotly": _packed_plotly(),
        "caption": caption,
        "numbers": {
            "log": log,
            "axes": [choice(name, metric) for name, metric in axes.items()],
            "measures": [choice(metric.name, metric) for metric in measures],
            "curves": [
                {
                    "name": curve.name,
                    "detail": curve.detail,
                    "look": curve.look,
                    "notes": list(curve.notes),
                    "axes": {name: list(curve.axes[name]) for name in axes if name in curve.axes},
                    "measures": {
                        metric.name: list(curve.measures[metric.name])
                        for metric in measures
                        if metric.name in curve.measures
                    },
                }
                for curve in curves
            ],
        },
    }


@cache
def _packed_plotly() -> str:
    """plotly.js, gzipped, in base64: 2.0 MB instead of 4.8 (plotly 7.1)."""
    from plotly.offline import get_plotlyjs  # Late: it takes a while, and most pages need none.

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
