"""The picture of what `adloco gradients` has measured at one checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adloco.report.drawing import COLOURS, GREY, MARKS, plain, save_figure

ROW = 0.24
"""Height of a bar, in inches."""


def draw_gradients(content: Mapping[str, Any], path: Path) -> Path:
    """Write the picture of a file of the run's folder `gradients` as a PNG file.

    Args:
        content: What `measure_gradients` returns, or the same from its file.
        path: The picture's file.
    """
    layers, kinds = content["layers"], content["kinds"]
    bars = max(2.6, ROW * max(len(layers), len(kinds)) + 0.8)
    figure = Figure(figsize=(10, 3.4 + bars), layout="constrained")
    panels = figure.subplots(2, 2, height_ratios=(3.0, bars))
    _histogram(panels[0, 0], content, "deviation", "|g - F|, distance to the full gradient F")
    _histogram(panels[0, 1], content, "cosine", "cosine of g with F")
    scale = content["total"]["noise_scale"]
    _bars(panels[1, 0], layers, scale, "by layer")
    _bars(panels[1, 1], kinds, scale, "by kind of parameter")
    figure.suptitle(
        f"Gradients g of {content['num_batches']:,} batches of {content['batch']:,}: round "
        f"{content['round']:,}, trainer {content['trainer']}",
        fontsize=12,
    )
    save_figure(figure, path)
    return path


def _histogram(axis: Axes, content: Mapping[str, Any], name: str, label: str) -> None:
    values = [batch[name] for batch in content["batches"] if batch[name] is not None]
    spread = content[name]
    if values:
        bins = max(5, min(60, round(2 * len(values) ** 0.5)))
        axis.hist(values, bins=bins, color=COLOURS[0], alpha=0.75)
        axis.axvline(spread["mean"], color=COLOURS[1], label=f"mean {spread['mean']:.3g}")
        median = f"median {spread['median']:.3g}"
        axis.axvline(spread["median"], color=MARKS, linestyle="--", label=median)
        if spread["excess_kurtosis"] is not None:
            axis.plot([], [], " ", label=f"excess kurtosis {spread['excess_kurtosis']:.2f}")
        _legend(axis)
    axis.set_xlabel(label)
    axis.set_ylabel("batches")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axis)


def _bars(axis: Axes, parts: Sequence[Mapping[str, Any]], total: float | None, where: str) -> None:
    """The noise scale of each part; one without a number has |G|^2 <= 0."""
    places = range(len(parts))
    scales = [part["noise_scale"] for part in parts]
    axis.barh(places, [scale or 0.0 for scale in scales], color=COLOURS[0], height=0.7)
    for place, scale in enumerate(scales):
        text = "|G|² ≤ 0" if scale is None else f"{scale:,.1f}"
        axis.annotate(
            text, (scale or 0.0, place), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
    if total is not None:
        axis.axvline(total, color=GREY, linestyle="--", label=f"whole model {total:,.1f}")
        _legend(axis)
    axis.set_yticks(places, [part["name"] for part in parts], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(right=1.15 * max([scale or 0.0 for scale in scales] + [total or 0.0, 1e-12]))
    axis.set_xlabel(f"noise scale S / |G|² in samples, {where}")
    plain(axis)


def _legend(axis: Axes) -> None:
    """A line above the panel, where it covers nothing."""
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
