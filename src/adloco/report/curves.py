"""Interactive charts for a page: the numbers that plotly.js draws (templates/charts.html)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from adloco.metrics import Metric

MOST_POINTS = 4000
"""A curve of more points is thinned to about half as many for each measure: pages stay small."""
Look = Literal["line", "strong", "grey", "thin", "points", "stairs", "marks"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart: its numbers on every axis, and every measure."""

    name: str
    """Shown in the legend; curves of one name share a colour and are toggled together."""
    detail: str = ""
    """Shown beside the pointer, for instance the seed."""
    axes: Mapping[str, Sequence[float]]
    """Name of an axis -> values. The line is shown only on the axes that it has."""
    measures: Mapping[str, Sequence[float | None]]
    look: Look = "line"
    """line: a colour of its name's own; strong: the colour of text; thin: as `line`, but thin and
    under the others; points: as `line`, but not joined; stairs: as `line`, but each value extends
    from the x of the point before to its own; marks: triangles in the colour of text."""
    notes: Sequence[str] = ()
    """Shown beside the pointer, one for each point; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of curves. With several axes or measures, the reader chooses among them."""

    axes: Mapping[str, Metric]
    """Choices for x by their names in `Curve.axes`."""
    measures: Sequence[Metric]
    """Choices for y; the first is shown at first."""
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    """True: y begins at 0."""
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Axis -> x of vertical dotted lines."""

    @property
    def numbers(self) -> dict[str, Any]:
        """Input of templates/charts.html."""

        def choice(name: str, metric: Metric) -> dict[str, Any]:
            scale, whole = metric.unit.scale, metric.whole and metric.unit.scale == 1
            return {"name": name, "label": metric.axis, "scale": scale, "whole": whole}

        return {
            "log": {"x": self.log_x, "y": self.log_y},
            "zero": self.from_zero,
            "marks": self.marks,
            "axes": [choice(name, metric) for name, metric in self.axes.items()],
            "measures": [choice(metric.name, metric) for metric in self.measures],
            "curves": [vars(_thinned(curve)) for curve in self.curves],
        }


def _thinned(curve: Curve) -> Curve:
    """The curve; of too many points, both ends and the lowest and highest value of each stretch."""
    count = max(map(len, curve.axes.values()), default=0)
    if count <= MOST_POINTS:
        return curve
    size = -(-4 * count // MOST_POINTS)
    kept = {0, count - 1}
    for values in curve.measures.values():
        for begin in range(0, count, size):
            places = range(begin, min(begin + size, count))
            known = [(value, at) for at in places if (value := values[at]) is not None]
            kept |= {min(known)[1], max(known)[1]} if known else set()

    def thin(values: Sequence[Any]) -> list[Any]:
        return [values[at] for at in sorted(kept)] if values else []

    return replace(
        curve,
        axes={name: thin(values) for name, values in curve.axes.items()},
        measures={name: thin(values) for name, values in curve.measures.items()},
        notes=thin(curve.notes),
    )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Charts under one heading, with what they say."""

    title: str
    """Empty: no heading."""
    caption: str
    charts: Sequence[Chart]
