"""What all pictures share: colours, labelled axes, and how they are written."""

from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from adloco.metrics import Metric
from adloco.whole_file import write_bytes

COLOURS = ("#0b6e99", "#d9730d", "#2e8b57", "#ad1a72", "#6940a5", "#b8860b", "#c0392b", "#4a5568")
DASHES = ("-", "--", ":", "-.")
GREY, MARKS = "#b0b7c3", "#6b7280"


def line_look(number: int) -> dict[str, Any]:
    """Colour and dashes of a line, told apart up to 32 lines."""
    group, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[group % len(DASHES)]}


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_bytes(path, png.getvalue())


def label_axis(axis: Axes, x: Metric, y: str) -> None:
    """Label and format the axes; x begins at 0."""
    # The formatter shows 2.5e6 bytes as 2.5M: the axis is in the unit of the file.
    axis.set_xlabel(x.axis if x.unit.scale == 1 else f"{x.label} ({x.unit.name})")
    axis.set_ylabel(y)
    axis.set_xlim(left=-0.03 * axis.get_xlim()[1])  # A line at 0 stays visible beside the axis.
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=x.whole))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    if axis.get_yscale() == "linear":
        axis.ticklabel_format(axis="y", useOffset=False)
    plain(axis)


def plain(axis: Axes) -> None:
    """A light grid under what is drawn, and no lines above and at the right."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _short(value: float, _: int) -> str:
    """1.5k and 2M; numbers below 1 without a prefix, because 500m can be read as minutes."""
    return EngFormatter(sep="")(value) if value >= 1 else f"{value:g}"
