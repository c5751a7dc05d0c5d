"""Pictures of a comparison as PNG: the loss against every axis."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adloco.report.drawing import label_axis, line_look, save_figure
from adloco.study.comparison import Comparison

PANELS_IN_A_ROW = NAMES_IN_A_ROW = 3


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write a picture for each measure of the task and return the paths."""
    paths = []
    for metric in comparison.measures:
        rows = math.ceil(len(comparison.axes) / PANELS_IN_A_ROW)
        legend = math.ceil(len(comparison.arms) / NAMES_IN_A_ROW)
        figure = Figure(figsize=(12, 3.4 * rows + 0.7 + 0.2 * legend), layout="constrained")
        panels = figure.subplots(rows, PANELS_IN_A_ROW, sharey=True, squeeze=False).flatten()
        for index, (panel, name) in enumerate(zip(panels, comparison.axes, strict=False)):
            _draw_lines(panel, comparison, name, metric.name)
            y = metric.axis if index % PANELS_IN_A_ROW == 0 else ""
            label_axis(panel, comparison.axes[name], y)
        for panel in panels[len(comparison.axes) :]:
            panel.remove()
        lines = panels[0].get_legend_handles_labels()
        figure.legend(
            *lines, loc="outside lower center", ncols=NAMES_IN_A_ROW, handlelength=3, frameon=False
        )
        figure.suptitle(f"{metric.label}\n{comparison.statement}", fontsize=9, wrap=True)
        paths.append(folder / f"compare_{metric.name.removeprefix('val_')}.png")
        save_figure(figure, paths[-1])
    return paths


def _draw_lines(panel: Axes, comparison: Comparison, axis: str, measure: str) -> None:
    """A line per seed, and a look per arm."""
    for number, (arm, runs) in enumerate(comparison.arms.items()):
        for index, run in enumerate(runs):
            pairs = zip(run.axes[axis], run.measures[measure], strict=True)
            points = [(x, y) for x, y in pairs if y is not None]
            panel.plot(
                [x for x, _ in points],
                [y for _, y in points],
                **line_look(number),
                linewidth=1.4,
                alpha=0.85,
                label=arm if index == 0 else None,
            )
