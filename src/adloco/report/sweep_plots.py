"""Pictures of a sweep: the final loss over each axis, and a heat map for each pair of axes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from adloco.report.drawing import line_look, save_figure
from adloco.study.arms import Flags
from adloco.study.comparison import Comparison


def draw_sweep(
    comparison: Comparison,
    axes: Mapping[str, Sequence[str]],
    points: Mapping[str, Flags],
    folder: Path,
) -> list[Path]:
    """Write the pictures and return their paths.

    Args:
        comparison: The sweep's runs.
        axes: Axis -> values.
        points: Arm -> its point of the grid.
        folder: Where to write.
    """
    finals = {arm: comparison.finals(arm, comparison.loss.name) for arm in comparison.arms}
    means = {points[arm]: spread.mean for arm, spread in finals.items() if spread.mean is not None}
    paths = [_over_axis(comparison, axes, means, axis, folder) for axis in axes]
    for first, second in itertools.combinations(axes, 2):
        paths.append(_heat_map(comparison, axes, means, (first, second), folder))
    return paths


def _over_axis(
    comparison: Comparison,
    axes: Mapping[str, Sequence[str]],
    means: Mapping[Flags, float],
    axis: str,
    folder: Path,
) -> Path:
    """The final loss over one axis, with a line for each point of the others."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    panel = figure.subplots()
    lines: dict[Flags, dict[str, float]] = {}
    for point, mean in means.items():
        values = dict(point)
        rest = tuple(pair for pair in point if pair[0] != axis)
        lines.setdefault(rest, {})[values[axis]] = mean
    for number, (rest, line) in enumerate(lines.items()):
        places = [index for index, value in enumerate(axes[axis]) if value in line]
        panel.plot(
            places,
            [line[axes[axis][index]] for index in places],
            marker="o",
            label=", ".join(f"{name} {value}" for name, value in rest) or None,
            **line_look(number),
        )
    panel.set_xticks(range(len(axes[axis])), axes[axis])
    panel.set_xlabel(axis)
    panel.set_ylabel(f"final {comparison.loss.axis}")
    panel.grid(alpha=0.25)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(comparison.statement, fontsize=8, wrap=True)
    path = folder / f"sweep_{axis}.png"
    save_figure(figure, path)
    return path


def _heat_map(
    comparison: Comparison,
    axes: Mapping[str, Sequence[str]],
    means: Mapping[Flags, float],
    pair: tuple[str, str],
    folder: Path,
) -> Path:
    """The lowest final loss for each two values of a pair of axes, over the other axes."""
    first, second = pair
    table = np.full((len(axes[first]), len(axes[second])), np.nan)
    for point, mean in means.items():
        values = dict(point)
        at = axes[first].index(values[first]), axes[second].index(values[second])
        table[at] = mean if np.isnan(table[at]) else min(table[at], mean)
    size = (max(6.5, 2 + 1.1 * table.shape[1]), max(3.8, 2 + 0.6 * table.shape[0]))
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(table, cmap="viridis_r", aspect="auto")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "black" if value < middle else "white"
            panel.text(column, row, f"{value:.3f}", ha="center", va="center", color=colour)
    panel.set_xticks(range(len(axes[second])), axes[second])
    panel.set_yticks(range(len(axes[first])), axes[first])
    panel.set_xlabel(second)
    panel.set_ylabel(first)
    figure.colorbar(image, label=f"final {comparison.loss.axis}")
    figure.suptitle(comparison.statement, fontsize=7, wrap=True)
    path = folder / f"sweep_{first}_{second}.png"
    save_figure(figure, path)
    return path
