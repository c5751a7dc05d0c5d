"""The charts of a page as PNG, drawn from the same `Chart` as the page's own."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from adloco.metrics import Metric
from adloco.report.curves import Chart, Look, Panel
from adloco.report.drawing import GREY, line_look, plain, save_figure

IN_A_ROW = 3
"""Charts in a row, and names in a row of the legend."""
LOOKS: dict[Look, dict[str, Any]] = {
    "line": {},
    "strong": {"color": "black", "zorder": 3},
    "grey": {"color": GREY},
    "thin": {"linewidth": 0.8, "alpha": 0.6, "zorder": 1.9},
    "points": {"linestyle": "", "marker": "o", "markersize": 4},
    "stairs": {"drawstyle": "steps-pre"},
    "marks": {"color": "black", "linestyle": "", "marker": "v"},
}
"""Options of matplotlib for each look of a curve."""
Shown = Sequence[tuple[Chart, str, Metric]]
"""Panels that stand beside one another in a picture: a chart, the axis for x, the measure for y."""


def draw_run(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Write a picture for each panel, named by its title, and return the paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for panel in panels:
        charts = [(each, next(iter(each.axes))) for each in panel.charts]
        shown = [(chart, axis, metric) for chart, axis in charts for metric in chart.measures]
        paths.append(folder / f"{re.sub('[^a-z]+', '_', panel.title.lower())}.png")
        draw(shown, panel.title, paths[-1])
    return paths


def draw_comparison(chart: Chart, statement: str, folder: Path) -> None:
    """Write a picture for each measure, against every axis."""
    for metric in chart.measures:
        path = folder / f"compare_{metric.name.removeprefix('val_')}.png"
        shown = [
            (replace(chart, log_x=_far_apart(chart, axis)), axis, metric) for axis in chart.axes
        ]
        draw(shown, f"{metric.label}\n{statement}", path, same_y=True)


def _far_apart(chart: Chart, axis: str) -> bool:
    """True if some curves end at so small an x that others would leave them no width."""
    ends = [curve.axes[axis][-1] for curve in chart.curves if curve.axes.get(axis)]
    return bool(ends) and max(ends) > 100 * min(ends) > 0


def draw(shown: Shown, title: str, path: Path, *, same_y: bool = False) -> None:
    """Write one picture.

    same_y: True if all charts show one measure: y is labelled on the left only.
    """
    curves = [curve for chart, _, _ in shown for curve in chart.curves]
    own = dict.fromkeys(curve.name for curve in curves if "color" not in LOOKS[curve.look])
    looks = {name: line_look(number) for number, name in enumerate(own)}
    rows, columns = math.ceil(len(shown) / IN_A_ROW), min(len(shown), IN_A_ROW)
    height = 3.6 * rows + 0.5 + 0.2 * math.ceil(len({curve.name for curve in curves}) / IN_A_ROW)
    figure = Figure(figsize=(max(8.0, 1 + 4.5 * columns), height), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False, sharey=same_y).flatten()
    names: dict[str, Artist] = {}
    for index, (place, (chart, axis, metric)) in enumerate(zip(places, shown, strict=False)):
        _draw_chart(place, chart, axis, metric, looks)
        if not same_y or index % columns == 0:
            place.set_ylabel(metric.axis)
        for line, name in zip(*place.get_legend_handles_labels(), strict=True):
            names.setdefault(name, line)  # The look of the first of a name.
    for place in places[len(shown) :]:
        place.remove()
    figure.legend(
        names.values(),
        names,
        loc="outside lower center",
        ncols=IN_A_ROW,
        handlelength=3,
        frameon=False,
    )
    figure.suptitle(title, fontsize=9 if "\n" in title else 12, wrap=True)
    save_figure(figure, path)


def _draw_chart(
    place: Axes, chart: Chart, axis: str, measure: Metric, looks: Mapping[str, dict[str, Any]]
) -> None:
    """Draw the curves of a chart against one of its axes, in the units that it shows."""
    x, scale = chart.axes[axis], chart.axes[axis].unit.scale
    for curve in chart.curves:
        points = [
            (at / scale, value / measure.unit.scale)
            for at, value in zip(
                curve.axes.get(axis, ()), curve.measures.get(measure.name, ()), strict=False
            )
            if value is not None and math.isfinite(value)
        ]
        if points:
            look = looks.get(curve.name, {}) | LOOKS[curve.look]
            if curve.look == "stairs":  # Its first value holds from the beginning.
                points.insert(0, (0, points[0][1]))
            if len(points) == 1:  # A line through one point is not seen.
                look = {"marker": "o"} | look
            place.plot(*zip(*points, strict=True), label=curve.name, **look)
    for mark in chart.marks.get(axis, ()):
        place.axvline(mark / scale, color=GREY, linestyle=":", linewidth=1, zorder=0)
    place.set_xlabel(x.axis)
    if chart.log_x:
        _make_log(place, "x")
    else:
        # A line at 0 stays visible beside the axis.
        place.set_xlim(left=-0.03 * place.get_xlim()[1])
        place.xaxis.set_major_locator(MaxNLocator(5, integer=x.whole))
        place.xaxis.set_major_formatter(FuncFormatter(_short))
    if chart.log_y:
        _make_log(place, "y")
    else:
        place.ticklabel_format(axis="y", useOffset=False)
        if chart.from_zero:
            place.set_ylim(bottom=0)
    plain(place)


def _make_log(place: Axes, name: Literal["x", "y"]) -> None:
    """Labels at 1, 2 and 5 in each decade, or at 1 alone where there are many decades."""
    place.set(**{f"{name}scale": "log"})
    axis: Axis = getattr(place, f"{name}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _: int) -> str:
    """1.5k and 2M; numbers below 1 without a prefix, because 500m can be read as minutes."""
    return EngFormatter(sep="")(value) if value >= 1 else f"{value:g}"
