"""The chart of the loss: evaluations, means of the rounds and inner steps, on every axis."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from adloco.metrics import ROUND, Metric, Record, validation
from adloco.report.curves import Chart, Curve, Panel

POINTS = 500
"""At most so many points of a trainer are shown; each is a mean over equally many inner steps."""


def loss_panel(
    declared: Sequence[Metric], records: Sequence[Record], steps: Iterable[Record]
) -> Panel:
    """The measures that the task declares, and the training loss.

    Args:
        declared: What the task measures in an evaluation, the loss first.
        steps: The lines of steps.jsonl.
    """
    measures = [replace(validation(measure), label=measure.label) for measure in declared]
    # Choices for x that are not 0 throughout.
    names = ("tokens", "inner_steps", "round", "syncs", "bytes_sent", "seconds")
    axes = {name: ROUND[name] for name in names if records[-1][name]}
    numbers = {name: [record[name] for record in records] for name in axes}
    each = steps_per_point(records)
    merges = [record["merges"] for record in records]
    validated = Curve(
        name="validation",
        axes=numbers,
        measures={metric.name: [r.get(metric.name) for r in records] for metric in measures},
        look="strong",
    )
    of_rounds = Curve(
        name="train",
        detail="mean of the round",
        axes=numbers,
        measures=_in_training(measures, [record["train_loss"] for record in records]),
        look="grey",
    )
    of_steps = [
        Curve(
            name=f"steps of trainer {trainer}",
            detail=f"mean of {each} inner steps" if each > 1 else "one inner step",
            axes={axis: line[axis] for axis in ("tokens", "inner_steps")},
            measures=_in_training(measures, line["loss"]),
            look="thin",
        )
        for trainer, line in step_losses(records, steps).items()
    ]
    chart = Chart(
        axes=axes,
        measures=measures,
        curves=[validated, of_rounds, *of_steps],
        marks={
            name: [x for x, merge in zip(found, merges, strict=True) if merge]
            for name, found in numbers.items()
        },
    )
    return Panel(title="Loss", caption=_caption(each), charts=[chart])


def _in_training(
    measures: Sequence[Metric], losses: Sequence[float | None]
) -> Mapping[str, list[float | None]]:
    """The loss, and each measure that follows from it, of training."""
    loss, *others = measures
    return {loss.name: list(losses)} | {
        metric.name: [None if value is None else metric.of_loss(value) for value in losses]
        for metric in others
        if metric.of_loss
    }


def _caption(each: int) -> str:
    of_steps = "each inner step" if each == 1 else f"every {each} inner steps"
    return (
        "Healthy: it falls fast at first and then slowly, validation follows train, and the "
        "trainers stay close together. Validation that rises while train falls means that text is "
        "repeated too often; a jump means bad data or a learning rate that is too high. "
        "Validation and train are numbers at the end of each round; steps are the training loss "
        f"of {of_steps} (mean over the samples of a trainer), shown over tokens (of all trainers) "
        f"and inner steps (of each worker). A dotted line is a merge."
    )


def steps_per_point(records: Sequence[Record]) -> int:
    """Inner steps that one point stands for."""
    return -(-int(records[-1]["inner_steps"]) // POINTS)


def step_losses(
    records: Sequence[Record], steps: Iterable[Record]
) -> dict[int, dict[str, list[float]]]:
    """Read the step losses of each trainer.

    steps: The lines of steps.jsonl; those of a round that is not complete are left out.

    Returns:
        Trainer, by rising number -> `tokens` of all trainers and `inner_steps` of each worker at
        the end of a step, and `loss` over the samples of all workers before its update; each as
        means over the steps of a point. A loss that is not finite enters no mean.
    """
    last = records[-1]
    total = int(last["inner_steps"])
    every = np.zeros(total)
    samples: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(total))
    summed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(total))
    for step in steps:
        trainer, at = step["trainer"], step["inner_step"] - 1
        if at >= total:
            continue
        every[at] += step["samples"]
        if step["loss"] is not None:
            samples[trainer][at] += step["samples"]
            summed[trainer][at] += step["samples"] * step["loss"]
    lost = every == 0  # Records of whole rounds can be lost.
    if lost.any():
        every[lost] = (last["samples"] - every.sum()) / lost.sum()
    axes = {
        "tokens": every.cumsum() * (last["tokens"] / last["samples"]),
        "inner_steps": np.arange(1.0, total + 1),
    }
    point = np.arange(total) // steps_per_point(records)

    found = {}
    for trainer, weights in sorted(samples.items()):
        known = weights > 0
        first = np.flatnonzero(np.diff(point[known], prepend=-1))  # Where each point begins.
        counts = np.add.reduceat(known[known], first, dtype=float)
        means = {
            name: np.add.reduceat(numbers[known], first) / counts for name, numbers in axes.items()
        }
        losses = np.add.reduceat(summed[trainer][known], first)
        means["loss"] = losses / np.add.reduceat(weights[known], first)
        found[trainer] = {name: numbers.tolist() for name, numbers in means.items()}
    return found
