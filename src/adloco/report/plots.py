"""Draws the plots of a run: the loss against tokens, rounds, bytes and time; all else against
tokens.

The tables of metrics.py say which numbers a plot shows (`Metric.panel`) and how they are labelled.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from adloco.metrics import METRICS, ROUND, Metric, Record, rows, validation, values
from adloco.run.memory_use import PHASES

COLOURS = ("#0b6e99", "#d9730d", "#2e8b57", "#ad1a72", "#6940a5", "#b8860b", "#c0392b", "#4a5568")
GREY, MARKS = "#b0b7c3", "#6b7280"
Draw = Callable[[Sequence[Metric], Sequence[Record]], Figure]


def draw_plots(records: Sequence[Record], folder: Path, measures: Sequence[Metric]) -> list[Path]:
    """Write every plot that has data as a PNG file.

    Args:
        records: The lines of metrics.jsonl.
        folder: Where the files are written.
        measures: What the task measures in an evaluation, the loss first.

    Returns:
        The paths, in the order of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    per_trainer = validation(measures[0], "trainer", panel="trainers")
    metrics = [*(validation(measure) for measure in measures), per_trainer, *METRICS]
    drawn = {
        metric.panel
        for metric in metrics
        if any(number for numbers in values(metric, records) for number in numbers)
    }
    drawn -= set() if len(records[0]["workers"]) > 1 else {"workers"}
    drawn -= set() if any(record["sync"]["bytes"] for record in records) else {"wire"}
    pictures: dict[str, tuple[Draw, str]] = {
        "loss": (_loss, "Loss (dotted: merges)"),
        **{
            measure.panel: (
                _measure,
                f"Validation {measure.label} of the trainer with the lowest loss",
            )
            for measure in measures[1:]
            if measure.panel
        },
        "batch": (_each, "Batch of each trainer, and micro-batches per inner step"),
        "noise_scale": (
            _noise_scale,
            "Gradient statistics, smoothed as the batch rule sees them (gaps: |G|² is not "
            "positive)",
        ),
        "trainers": (_each, "Trainers (dotted: merges)"),
        "workers": (_each, "Share of each worker, and how long it waited for the slowest"),
        "communication": (_communication, "Communication (dotted: merges)"),
        "wire": (_wire, "Syncs: similarity of workers, loss by the wire format, seconds"),
        "memory": (_memory, "Memory by phase of a round"),
    }
    paths = []
    for name, (draw, title) in pictures.items():
        if name not in drawn:
            continue
        figure = draw([metric for metric in metrics if metric.panel == name], records)
        figure.suptitle(title, fontsize=12)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _figure(height: float = 3.8) -> Figure:
    return Figure(figsize=(10, height), layout="constrained")


def _loss(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure(6.4)
    measured, trained = metrics
    sent = (
        ROUND["bytes_communicated"] if records[-1]["bytes_communicated"] else ROUND["bytes_inside"]
    )
    for axis, x in zip(
        figure.subplots(2, 2, sharey=True).flatten(),
        (ROUND["tokens"], ROUND["round"], sent, ROUND["seconds"]),
        strict=True,
    ):
        _over(axis, x, trained, records, color=GREY, linewidth=1.2, label="train")
        _over(axis, x, measured, records, color=COLOURS[0], linewidth=2, label="validation")
        label_axis(axis, x, f"loss ({measured.unit.name})")
    figure.axes[0].legend(frameon=False)
    return figure


def _measure(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure(3.6)
    (metric,) = metrics
    for axis, x in zip(
        figure.subplots(1, 2, sharey=True), (ROUND["tokens"], ROUND["round"]), strict=True
    ):
        _over(axis, x, metric, records, color=COLOURS[0], linewidth=2)
        label_axis(axis, x, metric.axis)
    if metric.unit.form.endswith("%"):
        figure.axes[0].set_ylim(0, 1)
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def _each(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    """One axis per metric, with a line per trainer or worker."""
    figure = _figure()
    for axis, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        _lines(axis, metric, records)
        label_axis(axis, ROUND["tokens"], metric.axis, whole=metric.whole)
        if metric.per == "worker":
            axis.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False)
    return figure


def _noise_scale(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure()
    left, right = figure.subplots(1, 2)
    variance, norm, scale = metrics
    _lines(left, scale, records)
    label_axis(left, ROUND["tokens"], scale.axis)
    left.set_yscale("log")
    left.legend(frameon=False)
    _lines(right, norm, records)
    _lines(right, variance, records, linestyle="--")
    label_axis(right, ROUND["tokens"], f"{norm.label} (solid), {variance.label} (dashed)")
    right.set_yscale("log", nonpositive="mask")
    return figure


def _communication(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure()
    axis = figure.subplots()
    for metric, colour in zip(metrics, (COLOURS[0], COLOURS[1], GREY), strict=True):
        if records[-1][metric.name] or metric is not ROUND["bytes_inside"]:
            _over(
                axis,
                ROUND["tokens"],
                metric,
                records,
                color=colour,
                linewidth=2,
                label=metric.label,
            )
    if records[-1]["bytes_communicated"]:
        axis.set_yscale("log")
    label_axis(axis, ROUND["tokens"], f"sent ({metrics[0].unit.shown})")
    axis.legend(frameon=False)
    return figure


def _wire(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure()
    *seconds, cosine, lost = metrics
    worst = max((number for numbers in values(lost, records) for number in numbers), default=0.0)
    alike, *rest = figure.subplots(1, 3 if worst else 2)
    _lines(alike, cosine, records)
    label_axis(alike, ROUND["tokens"], cosine.axis)
    alike.axhline(0, color=MARKS, linewidth=1)
    alike.set_ylim(bottom=min(alike.get_ylim()[0], -0.05), top=1.05)
    alike.legend(frameon=False)
    if worst:
        _lines(rest[0], lost, records)
        label_axis(rest[0], ROUND["tokens"], lost.axis)
        rest[0].set_ylim(0, 1.2 * worst)
    for metric, colour in zip(seconds, COLOURS[1:], strict=False):
        points = [(record["tokens"], record["sync"][metric.name]) for record in records]
        rest[-1].plot(*_steps(points), color=colour, linewidth=2, label=metric.label)
    label_axis(rest[-1], ROUND["tokens"], "seconds of syncs per round")
    # Leaves room for the legend above the curves.
    rest[-1].set_ylim(
        0, 1.35 * max(number for metric in seconds for (number,) in values(metric, records))
    )
    rest[-1].legend(frameon=False, loc="upper right")
    return figure


def _memory(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = _figure()
    whole, *of_phases = metrics
    axes = figure.subplots(1, 2, sharey=True)
    _over(axes[0], ROUND["tokens"], whole, records, color=GREY, linewidth=5, label=whole.label)
    for axis, metric in zip(axes, of_phases, strict=True):
        for phase, colour in zip(PHASES, COLOURS, strict=False):
            points = [
                (record["tokens"], record["memory"][phase][metric.name])
                for record in records
                if phase in record["memory"]
            ]
            known = [(x, y / metric.unit.scale) for x, y in points if y is not None]
            axis.plot(
                [x for x, _ in known],
                [y for _, y in known],
                color=colour,
                marker="o",
                markersize=2.5,
                label=phase.replace("_", " "),
            )
        label_axis(axis, ROUND["tokens"], metric.axis)
    axes[0].set_ylim(0, 1.1 * records[-1][whole.name] / whole.unit.scale)
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def _over(axis: Axes, x: Metric, y: Metric, records: Sequence[Record], **style: Any) -> None:
    """Plot a number of the round against another one."""
    points = [
        (record[x.name], record[y.name] / y.unit.scale)
        for record in records
        if record.get(y.name) is not None
    ]
    axis.plot([at for at, _ in points], [value for _, value in points], **style)
    _mark_merges(axis, x, records)


def _lines(axis: Axes, metric: Metric, records: Sequence[Record], **style: Any) -> None:
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
            axis.plot(*_steps(points), **look)
        else:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=2.5, **look)
    _mark_merges(axis, ROUND["tokens"], records)


def _steps(points: Sequence[tuple[float, float]]) -> list[list[float]]:
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
    """Label and format the axes. With `whole`, y is a count, and its axis begins at 0."""
    # The formatter shows 2.5e6 bytes as 2.5M: the axis is in the unit of the file.
    axis.set_xlabel(x.axis if x.unit.scale == 1 else f"{x.label} ({x.unit.name})")
    axis.set_ylabel(y)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=x.whole))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axis.get_yscale() == "linear":
        axis.ticklabel_format(axis="y", useOffset=False)
    if whole:
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
