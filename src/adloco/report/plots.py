"""Draws the plots of a run: the loss on several axes (loss_plot.py), all else against tokens.

The tables of metrics.py say which numbers a plot shows (`Metric.panel`) and how they are labelled.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from adloco.errors import require
from adloco.metrics import METRICS, ROUND, Metric, Record, validation, values
from adloco.report.drawing import (
    COLOURS,
    GREY,
    MARKS,
    draw_lines,
    draw_over,
    figure_of,
    label_axis,
    log_y,
    save_figure,
    share_legend,
    staircase,
)
from adloco.report.loss_plot import loss_figure
from adloco.report.step_losses import StepLosses
from adloco.run.memory_use import PHASES

Draw = Callable[[Sequence[Metric], Sequence[Record]], Figure]


def draw_plots(
    records: Sequence[Record],
    steps: Sequence[StepLosses],
    folder: Path,
    measures: Sequence[Metric],
) -> list[Path]:
    """Write every plot that has data as a PNG file.

    Args:
        records: The lines of metrics.jsonl.
        steps: Training losses of the inner steps.
        folder: Where the files are written.
        measures: What the task measures in an evaluation, the loss first.

    Returns:
        The paths, in the order of the report.
    """
    require(
        not folder.is_symlink(),
        f"{folder} is a symbolic link, which a report does not follow; remove it",
    )
    folder.mkdir(parents=True, exist_ok=True)
    per_trainer = validation(measures[0], "trainer", panel="trainers")
    metrics = [*(validation(measure) for measure in measures), per_trainer, *METRICS]
    drawn = {
        metric.panel
        for metric in metrics
        if any(number for numbers in values(metric, records) for number in numbers)
    }
    # What the loss and the batch show already.
    drawn -= {name for name in ("trainers", "workers") if len(records[0][name]) == 1}
    drawn -= set() if any(record["sync"]["bytes"] for record in records) else {"wire"}
    merges = " (dotted: merges)" if any(record["merges"] for record in records) else ""
    pictures: dict[str, tuple[Draw, str]] = {
        "loss": (partial(loss_figure, steps=steps, measures=measures), f"Loss{merges}"),
        **{
            measure.panel: (
                _measure,
                f"Validation {measure.label} of the trainer with the lowest loss",
            )
            for measure in measures[1:]
            if measure.panel
        },
        "batch": (_batch, "Batch of each trainer, and micro-batches per inner step"),
        "noise_scale": (
            _noise_scale,
            "Gradient statistics, smoothed as the batch rule sees them (gaps: |G|² is not "
            "positive)",
        ),
        "trainers": (_each, f"Trainers{merges}"),
        "workers": (_each, "Share of each worker, and how long it waited for the slowest"),
        "communication": (_communication, f"Communication{merges}"),
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
        save_figure(figure, paths[-1])
    return paths


def _measure(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = figure_of(3.6)
    (metric,) = metrics
    for axis, x in zip(
        figure.subplots(1, 2, sharey=True), (ROUND["tokens"], ROUND["inner_steps"]), strict=True
    ):
        draw_over(axis, x, metric, records, color=COLOURS[0], linewidth=2)
        label_axis(axis, x, metric.axis)
    if metric.unit.form.endswith("%"):
        figure.axes[0].set_ylim(0, 1.03)  # A line at 100% stays visible.
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def _each(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    """One axis per metric, with a line per trainer or worker."""
    figure = figure_of()
    for axis, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        draw_lines(axis, metric, records)
        label_axis(axis, ROUND["tokens"], metric.axis, whole=metric.whole)
        if metric.per == "worker":
            axis.set_ylim(bottom=0)
    share_legend(figure)
    return figure


def _batch(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    """Requested and trained batch side by side; rounds whose request was clipped have a mark."""
    figure = figure_of()
    requested, accumulation, trained = metrics
    ask, use, passes = figure.subplots(1, 3)
    for axis, metric in ((ask, requested), (use, trained), (passes, accumulation)):
        draw_lines(axis, metric, records)
    clipped = [
        (record["tokens"], row[trained.name])
        for record in records
        for row in record["trainers"]
        if row[trained.name] < row[requested.name]
    ]
    if clipped:
        use.plot(*zip(*clipped, strict=True), "v", color="black", markersize=4, label="clipped")
    for axis, metric in ((ask, requested), (use, trained), (passes, accumulation)):
        label_axis(axis, ROUND["tokens"], metric.axis, whole=True)
    highest = max(ask.get_ylim()[1], use.get_ylim()[1])
    for axis in (ask, use):
        axis.set_ylim(0, highest)
    share_legend(figure)
    return figure


def _noise_scale(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = figure_of()
    left, right = figure.subplots(1, 2)
    variance, norm, scale = metrics
    draw_lines(left, scale, records)
    label_axis(left, ROUND["tokens"], scale.axis)
    log_y(left)
    draw_lines(right, norm, records)
    draw_lines(right, variance, records, linestyle="--")
    label_axis(right, ROUND["tokens"], f"{norm.label} (solid), {variance.label} (dashed)")
    log_y(right)
    share_legend(figure)
    return figure


def _communication(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = figure_of()
    axis = figure.subplots()
    for metric, colour in zip(metrics, (COLOURS[0], COLOURS[1], GREY), strict=True):
        if records[-1][metric.name] or metric is not ROUND["bytes_inside"]:
            draw_over(
                axis,
                ROUND["tokens"],
                metric,
                records,
                color=colour,
                linewidth=2,
                label=metric.label,
            )
    if records[-1]["bytes_communicated"]:
        log_y(axis)
    label_axis(axis, ROUND["tokens"], f"sent ({metrics[0].unit.shown})")
    share_legend(figure)
    return figure


def _wire(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = figure_of()
    *seconds, cosine, lost = metrics
    worst = max((number for numbers in values(lost, records) for number in numbers), default=0.0)
    alike, *rest = figure.subplots(1, 3 if worst else 2)
    draw_lines(alike, cosine, records)
    label_axis(alike, ROUND["tokens"], cosine.axis)
    alike.axhline(0, color=MARKS, linewidth=1)
    alike.set_ylim(bottom=min(alike.get_ylim()[0], -0.05), top=1.05)
    if worst:
        draw_lines(rest[0], lost, records)
        label_axis(rest[0], ROUND["tokens"], lost.axis)
        rest[0].set_ylim(0, 1.2 * worst)
    for metric, colour in zip(seconds, COLOURS[-2:], strict=True):
        points = [(record["tokens"], record["sync"][metric.name]) for record in records]
        rest[-1].plot(*staircase(points), color=colour, linewidth=2, label=metric.label)
    label_axis(rest[-1], ROUND["tokens"], "seconds of syncs per round")
    rest[-1].set_ylim(bottom=0)
    share_legend(figure)
    return figure


def _memory(metrics: Sequence[Metric], records: Sequence[Record]) -> Figure:
    figure = figure_of()
    whole, *of_phases = metrics
    axes = figure.subplots(1, 2, sharey=True)
    draw_over(axes[0], ROUND["tokens"], whole, records, color=GREY, linewidth=5, label=whole.label)
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
    share_legend(figure)
    return figure
