"""Charts of a page as PNG, each against one of its axes."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adloco.metrics import Metric
from adloco.report.curves import Chart, Curve, Look, Panel
from adloco.report.drawing import GREY, label_axis, line_look, save_figure
from adloco.study.comparison import Comparison

IN_A_ROW = 3
"""Charts in a row, and names in a row of the legend."""
LOOKS: dict[Look, dict[str, Any]] = {
    "line": {},
    "strong": {"color": "black", "zorder": 3},
    "grey": {"color": GREY},
    "thin": {"linewidth": 0.8, "alpha": 0.6},
    "points": {"linestyle": "", "marker": "."},
    "stairs": {"drawstyle": "steps-pre"},
    "marks": {"color": "black", "linestyle": "", "marker": "v"},
}
"""How matplotlib draws each look of a curve."""
Shown = Sequence[tuple[Chart, str, Metric]]
"""What stands beside one another in a picture: a chart, the axis for x, the measure for y."""


def draw_run(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Write a picture for each panel, named by its title, and return the paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for panel in panels:
        charts = [(each, next(iter(each.axes))) for each in panel.charts]
        shown = [(chart, axis, metric) for chart, axis in charts for metric in chart.measures]
        paths.append(folder / f"{re.sub('[^a-z]+', '_', panel.title.lower())}.png")
        _draw(shown, panel.title, paths[-1])
    return paths


def draw_comparison(comparison: Comparison, chart: Chart, folder: Path) -> list[Path]:
    """Write a picture for each measure, against every axis, and return the paths."""
    paths = []
    for metric in chart.measures:
        paths.append(folder / f"compare_{metric.name.removeprefix('val_')}.png")
        shown = [(chart, axis, metric) for axis in chart.axes]
        _draw(shown, f"{metric.label}\n{comparison.statement}", paths[-1], same_y=True, fontsize=9)
    return paths


def _draw(
    shown: Shown, title: str, path: Path, *, same_y: bool = False, fontsize: int = 12
) -> None:
    """Write one picture.

    Args:
        shown: The charts in it.
        title: Its title.
        path: Its file.
        same_y: True if all charts show one measure: y is labelled on the left only.
        fontsize: Of the title.
    """
    curves = [curve for chart, _, _ in shown for curve in chart.curves]
    colours = _colours(curves)
    rows, columns = math.ceil(len(shown) / IN_A_ROW), min(len(shown), IN_A_ROW)
    height = 3.6 * rows + 0.5 + 0.2 * math.ceil(len({curve.name for curve in curves}) / IN_A_ROW)
    figure = Figure(figsize=(1 + 4.5 * columns, height), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False, sharey=same_y).flatten()
    for index, (place, (chart, axis, metric)) in enumerate(zip(places, shown, strict=False)):
        _draw_chart(place, chart, axis, metric, colours)
        left = not same_y or index % columns == 0
        label_axis(place, chart.axes[axis], (chart.title or metric.axis) if left else "")
    for place in places[len(shown) :]:
        place.remove()
    names = {
        name: line
        for place in places[: len(shown)]
        for line, name in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        names.values(),
        names,
        loc="outside lower center",
        ncols=IN_A_ROW,
        handlelength=3,
        frameon=False,
    )
    figure.suptitle(title, fontsize=fontsize, wrap=True)
    save_figure(figure, path)


def _draw_chart(
    place: Axes, chart: Chart, axis: str, measure: Metric, colours: Mapping[str, int]
) -> None:
    for curve in chart.curves:
        points = [
            (at, value / measure.unit.scale)
            for at, value in zip(
                curve.axes.get(axis, ()), curve.measures.get(measure.name, ()), strict=False
            )
            if value is not None and math.isfinite(value)
        ]
        if points:
            look = line_look(colours[curve.name]) if curve.name in colours else {}
            place.plot(*zip(*points, strict=True), label=curve.name, **look | LOOKS[curve.look])
    for merge in (chart.marks or {}).get(axis, ()):
        place.axvline(merge, color=GREY, linestyle=":", linewidth=1, zorder=0)
    if chart.log_y:
        place.set_yscale("log")
    elif chart.from_zero or chart.top:
        place.set_ylim(bottom=0, top=chart.top and chart.top / measure.unit.scale)


def _colours(curves: Sequence[Curve]) -> dict[str, int]:
    """Numbers for the names of curves that have a colour of their own."""
    own = [curve.name for curve in curves if "color" not in LOOKS[curve.look]]
    return {name: number for number, name in enumerate(dict.fromkeys(own))}
