"""Pictures of a sweep: the final loss over each axis, and a heat map for each pair of axes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adloco.report.drawing import line_look, plain, save_figure
from adloco.study.arms import Flags
from adloco.study.comparison import Comparison

Losses = Sequence[tuple[Mapping[str, str], float]]
"""Points of the grid, each with its mean final loss."""


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
    means = {arm: comparison.spread(comparison.finals[0], arm).mean for arm in comparison.arms}
    losses = [(dict(points[arm]), mean) for arm, mean in means.items() if mean is not None]
    loss, paths = f"final {comparison.loss.axis}", []
    for shown in [*((axis,) for axis in axes), *itertools.combinations(axes, 2)]:
        *other, axis = shown
        high = max(3.8, 2 + 0.6 * len(axes[other[0]])) if other else 4.2
        figure = Figure(figsize=(max(7, 2 + 1.1 * len(axes[axis])), high), layout="constrained")
        place = figure.subplots()
        place.set_xticks(range(len(axes[axis])), axes[axis])
        place.set_xlabel(axis)
        if other:
            _heat_map(place, axes, shown, losses)
            figure.colorbar(place.images[0], label=loss)
        else:
            _lines(place, axes[axis], axis, losses)
            place.set_ylabel(loss)
        figure.suptitle(comparison.statement, fontsize=8, wrap=True)
        paths.append(folder / f"sweep_{'_'.join(shown)}.png")
        save_figure(figure, paths[-1])
    return paths


def _lines(place: Axes, choices: Sequence[str], axis: str, losses: Losses) -> None:
    """The final loss over one axis, with a line for each point of the others."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for point, loss in losses:
        rest = ", ".join(f"{name} {value}" for name, value in point.items() if name != axis)
        lines.setdefault(rest, []).append((choices.index(point[axis]), loss))
    for number, (rest, line) in enumerate(lines.items()):
        x, y = zip(*sorted(line), strict=True)
        place.plot(x, y, marker="o", label=rest or None, **line_look(number))
    plain(place)
    if len(lines) > 1:
        place.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _heat_map(
    place: Axes, axes: Mapping[str, Sequence[str]], pair: Sequence[str], losses: Losses
) -> None:
    """The lowest final loss for each two values of a pair of axes, over the other axes."""
    first, second = pair
    rows, columns = axes[first], axes[second]
    table = np.full((len(rows), len(columns)), np.nan)
    for point, loss in losses:
        at = rows.index(point[first]), columns.index(point[second])
        table[at] = np.fmin(table[at], loss)
    place.imshow(table, cmap="viridis_r", aspect="auto")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (row, column), loss in np.ndenumerate(table):
        if not np.isnan(loss):
            colour = "black" if loss < middle else "white"
            place.text(column, row, f"{loss:.3f}", ha="center", va="center", color=colour)
    place.set_yticks(range(len(rows)), rows)
    place.set_ylabel(first)
