"""The chart of the loss: evaluations, means of the rounds and inner steps, on every axis."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adloco.metrics import ROUND, Metric, Record, validation
from adloco.report.curves import Chart, Curve, Panel
from adloco.report.step_losses import steps_per_point


def loss_panel(
    declared: Sequence[Metric],
    records: Sequence[Record],
    steps: Mapping[int, Mapping[str, list[float]]],
) -> Panel:
    """The measures that the task declares, and the training loss.

    Args:
        declared: What the task measures in an evaluation, the loss first.
        steps: Training losses of the inner steps, from `step_losses`.
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
        for trainer, line in steps.items()
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
