"""What all plots share: lines of a run's numbers, marks of merges, and labelled axes."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogFormatter, MaxNLocator

from adloco.metrics import ROUND, Metric, Record, rows, values
from adloco.whole_file import write_bytes

COLOURS = ("#0b6e99", "#d9730d", "#2e8b57", "#ad1a72", "#6940a5", "#b8860b", "#c0392b", "#4a5568")
DASHES = ("-", "--", ":", "-.")
GREY, MARKS = "#b0b7c3", "#6b7280"


def line_look(number: int) -> dict[str, Any]:
    """Colour and dashes of a line, told apart up to 32 lines."""
    group, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[group % len(DASHES)]}


def figure_of(height: float = 3.8) -> Figure:
    """An empty figure as wide as the report, so many inches high."""
    return Figure(figsize=(10, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_bytes(path, png.getvalue())


def draw_over(axis: Axes, x: Metric, y: Metric, records: Sequence[Record], **style: Any) -> None:
    """Plot a number of the round against another one."""
    points = [
        (record[x.name], record[y.name] / y.unit.scale)
        for record in records
        if record.get(y.name) is not None
    ]
    # A line through one point is not visible.
    look = ({"marker": "o"} if len(points) == 1 else {}) | style
    axis.plot([at for at, _ in points], [value for _, value in points], **look)
    _mark_merges(axis, x, records)


def draw_lines(axis: Axes, metric: Metric, records: Sequence[Record], **style: Any) -> None:
    """Plot a line per trainer or worker against tokens.

    Counts, and all numbers of workers, are a staircase, because they apply to the whole round;
    other numbers are points.
    """
    for number in sorted(
        {row[metric.per] for record in records for row in rows(record, metric.per)}
    ):
        found = zip(records, values(metric, records, number), strict=True)
        points = [(record["tokens"], value) for record, numbers in found for value in numbers]
        if not points:
            continue
        # Equal curves stay visible: those drawn first are wider.
        look: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "linewidth": max(1.2, 3.6 - 0.8 * number),
        }
        look |= {"label": f"{metric.per} {number}"} | style
        if metric.whole or metric.per == "worker":
            axis.plot(*staircase(points), **look)
        else:
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=2.5 if len(points) > 1 else 6,
                **look,
            )
    _mark_merges(axis, ROUND["tokens"], records)


def staircase(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """x and y of a staircase: each value extends from the x of the point before to its own x."""
    x, y = [0.0], [points[0][1]]
    for at, value in points:
        x, y = [*x, x[-1], at], [*y, value, value]
    return [x, y]


def _mark_merges(axis: Axes, x: Metric, records: Sequence[Record]) -> None:
    for record in records:
        if record["merges"]:
            axis.axvline(record[x.name], color=MARKS, linestyle=":", linewidth=1)


def label_axis(axis: Axes, x: Metric, y: str, *, whole: bool = False) -> None:
    """Label and format the axes; x begins at 0. With `whole`, y is a count and begins there too."""
    # The formatter shows 2.5e6 bytes as 2.5M: the axis is in the unit of the file.
    axis.set_xlabel(x.axis if x.unit.scale == 1 else f"{x.label} ({x.unit.name})")
    axis.set_ylabel(y)
    axis.set_xlim(left=-0.03 * axis.get_xlim()[1])  # A line at 0 stays visible beside the axis.
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=x.whole))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    if axis.get_yscale() == "linear":
        axis.ticklabel_format(axis="y", useOffset=False)
    if whole:
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _short(value: float, _: int) -> str:
    """1.5k and 2M; numbers below 1 without a prefix, because 500m can be read as minutes."""
    return EngFormatter(sep="")(value) if value >= 1 else f"{value:g}"


def log_y(axis: Axes) -> None:
    """Make y logarithmic, with plain numbers and gaps where a value is not positive."""
    axis.set_yscale("log", nonpositive="mask")
    axis.yaxis.set_major_formatter(_PlainLog())
    axis.yaxis.set_minor_formatter(_PlainLog())


class _PlainLog(LogFormatter):
    """Labels the ticks that matplotlib would label, as 0.5 and not as 5e-01."""

    def __call__(self, value: float, position: int | None = None) -> str:
        return f"{value:g}" if super().__call__(value, position) else ""


def share_legend(figure: Figure) -> None:
    """One legend for all panels, below them, where it hides no line."""
    found: dict[str, Artist] = {}
    for axis in figure.axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5, frameon=False)
