"""Pictures of a run as PNG: the panels of report.html, against the first of their axes."""

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

CHARTS_IN_A_ROW = NAMES_IN_A_ROW = 3
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


def draw_run(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Write a picture for each panel, named by its title, and return the paths."""
    paths = []
    folder.mkdir(exist_ok=True)
    for panel in panels:
        pictures = [(chart, measure) for chart in panel.charts for measure in chart.measures]
        rows = math.ceil(len(pictures) / CHARTS_IN_A_ROW)
        columns = min(len(pictures), CHARTS_IN_A_ROW)
        figure = Figure(figsize=(1 + 4.5 * columns, 3.6 * rows + 0.7), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        colours = _colours([curve for chart in panel.charts for curve in chart.curves])
        for place, (chart, measure) in zip(places, pictures, strict=False):
            _draw(place, chart, measure, colours)
        for place in places[len(pictures) :]:
            place.remove()
        names = {
            name: line
            for place in places[: len(pictures)]
            for line, name in zip(*place.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            names.values(), names, loc="outside lower center", ncols=NAMES_IN_A_ROW, frameon=False
        )
        figure.suptitle(panel.title)
        paths.append(folder / f"{re.sub('[^a-z]+', '_', panel.title.lower())}.png")
        save_figure(figure, paths[-1])
    return paths


def _draw(place: Axes, chart: Chart, measure: Metric, colours: Mapping[str, int]) -> None:
    (name, x), *_ = chart.axes.items()
    for curve in chart.curves:
        points = [
            (at, value / measure.unit.scale)
            for at, value in zip(
                curve.axes.get(name, ()), curve.measures.get(measure.name, ()), strict=False
            )
            if value is not None and math.isfinite(value)
        ]
        if points:
            look = line_look(colours[curve.name]) if curve.name in colours else {}
            place.plot(*zip(*points, strict=True), label=curve.name, **look | LOOKS[curve.look])
    for merge in (chart.marks or {}).get(name, ()):
        place.axvline(merge, color=GREY, linestyle=":", linewidth=1, zorder=0)
    if chart.log_y:
        place.set_yscale("log")
    elif chart.from_zero or chart.top:
        place.set_ylim(bottom=0, top=chart.top and chart.top / measure.unit.scale)
    label_axis(place, x, chart.title or measure.axis)


def _colours(curves: Sequence[Curve]) -> dict[str, int]:
    """Numbers for the names of curves that have a colour of their own."""
    own = [curve.name for curve in curves if "color" not in LOOKS[curve.look]]
    return {name: number for number, name in enumerate(dict.fromkeys(own))}
