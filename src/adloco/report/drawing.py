"""Shared style of pictures: colours, a plain frame, and the function that writes them."""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adloco.whole_file import write_bytes

COLOURS = ("#0b6e99", "#d9730d", "#2e8b57", "#ad1a72", "#6940a5", "#b8860b", "#c0392b", "#4a5568")
DASHES = ("-", "--", ":", "-.")
GREY = "#b0b7c3"


def line_look(number: int) -> dict[str, Any]:
    """Colour and dashes of a line, told apart up to 32 lines."""
    group, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[group % len(DASHES)]}


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    png = BytesIO()
    with warnings.catch_warnings():
        # For names in letters that matplotlib's font lacks; the page has them.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(png, format="png", dpi=120)
    write_bytes(path, png.getvalue())


def plain(axis: Axes) -> None:
    """A light grid under what is drawn, and no lines above and at the right."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
