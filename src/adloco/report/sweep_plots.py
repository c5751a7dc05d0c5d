"""Pictures of a sweep: the final loss over each axis, with a line for each point of the others."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from adloco.report.drawing import line_look, plain, save_figure
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
        axes: Axis -> values.
        points: Arm -> its point of the grid.
    """
    means = {arm: comparison.spread(comparison.finals[0], arm).mean for arm in comparison.arms}
    # A value whose runs failed is a gap in its line.
    losses = [(dict(points[arm]), math.nan if m is None else m) for arm, m in means.items()]
    paths = []
    for axis, choices in axes.items():
        lines: dict[str, list[tuple[int, float]]] = {}
        for point, loss in losses:
            rest = ", ".join(f"{name} {value}" for name, value in point.items() if name != axis)
            lines.setdefault(rest, []).append((choices.index(point[axis]), loss))
        figure = Figure(figsize=(max(7, 2 + 1.1 * len(choices)), 4.2), layout="constrained")
        place = figure.subplots()
        for number, (rest, line) in enumerate(lines.items()):
            x, y = zip(*sorted(line), strict=True)
            place.plot(x, y, marker="o", label=rest or None, **line_look(number))
        plain(place)
        place.set_xticks(range(len(choices)), choices)
        place.set_xlabel(axis)
        place.set_ylabel(f"final {comparison.loss.axis}")
        if len(lines) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        figure.suptitle(comparison.statement, fontsize=8, wrap=True)
        paths.append(folder / f"sweep_{axis}.png")
        save_figure(figure, paths[-1])
    return paths
