"""Pictures of a sweep: the final loss over each axis, and a heat map for each pair of axes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from adloco.report.drawing import line_look, save_figure
from adloco.study.arms import Flags
from adloco.study.comparison import Comparison

Means = Mapping[Flags, float]
"""Point of the grid -> mean final loss."""


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
    loss, paths = f"final {comparison.loss.axis}", []
    for shown in [*((axis,) for axis in axes), *itertools.combinations(axes, 2)]:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        panel = figure.subplots()
        if len(shown) == 1:
            _over_axis(figure, axes[shown[0]], shown[0], means)
            panel.set_ylabel(loss)
        else:
            image = _heat_map(figure, axes, means, shown)
            figure.colorbar(image, label=loss)
        panel.set_xticks(range(len(axes[shown[-1]])), axes[shown[-1]])
        panel.set_xlabel(shown[-1])
        figure.suptitle(comparison.statement, fontsize=8, wrap=True)
        paths.append(folder / f"sweep_{'_'.join(shown)}.png")
        save_figure(figure, paths[-1])
    return paths


def _over_axis(figure: Figure, choices: Sequence[str], axis: str, means: Means) -> None:
    """The final loss over one axis, with a line for each point of the others."""
    lines: dict[Flags, dict[int, float]] = {}
    for point, mean in means.items():
        rest = tuple(pair for pair in point if pair[0] != axis)
        lines.setdefault(rest, {})[choices.index(dict(point)[axis])] = mean
    (panel,) = figure.axes
    for number, (rest, line) in enumerate(lines.items()):
        label = ", ".join(f"{name} {value}" for name, value in rest) or None
        panel.plot(
            *zip(*sorted(line.items()), strict=True), marker="o", label=label, **line_look(number)
        )
    panel.grid(alpha=0.25)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _heat_map(
    figure: Figure, axes: Mapping[str, Sequence[str]], means: Means, pair: tuple[str, ...]
) -> AxesImage:
    """The lowest final loss for each two values of a pair of axes, over the other axes."""
    first, second = (axes[axis] for axis in pair)
    table = np.full((len(first), len(second)), np.nan)
    for point, mean in means.items():
        row, column = (axes[axis].index(dict(point)[axis]) for axis in pair)
        table[row, column] = np.fmin(table[row, column], mean)
    figure.set_size_inches(max(6.5, 2 + 1.1 * len(second)), max(3.8, 2 + 0.6 * len(first)))
    (panel,) = figure.axes
    image = panel.imshow(table, cmap="viridis_r", aspect="auto")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "black" if value < middle else "white"
            panel.text(column, row, f"{value:.3f}", ha="center", va="center", color=colour)
    panel.set_yticks(range(len(first)), first)
    panel.set_ylabel(pair[0])
    return image
