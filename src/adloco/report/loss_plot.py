"""The plot of the loss: evaluations, means of the rounds and inner steps, against tokens, inner
steps, bytes and time.
"""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from adloco.metrics import ROUND, Metric, Record
from adloco.report.drawing import (
    COLOURS,
    GREY,
    draw_over,
    figure_of,
    label_axis,
    share_legend,
)
from adloco.report.step_losses import StepLosses


def loss_figure(
    metrics: Sequence[Metric],
    records: Sequence[Record],
    *,
    steps: Sequence[StepLosses],
    measures: Sequence[Metric],
) -> Figure:
    """Draw the loss on four axes; a measure that follows from it has a scale at the right.

    Args:
        metrics: The loss of evaluations and that of training.
        records: The lines of metrics.jsonl.
        steps: Training losses of the inner steps, drawn where x counts tokens or inner steps.
        measures: What the task measures in an evaluation.
    """
    figure = figure_of(7)
    measured, trained = metrics
    sent = (
        ROUND["bytes_communicated"] if records[-1]["bytes_communicated"] else ROUND["bytes_inside"]
    )
    # Without other workers nothing is sent.
    x_axes = [ROUND["tokens"], ROUND["inner_steps"], ROUND["seconds"]]
    x_axes += [sent] if records[-1][sent.name] else []
    panels = list(figure.subplots(2, 2, sharey=True).flatten())
    for index, (panel, x) in enumerate(zip(panels, x_axes, strict=False)):
        for line in steps:
            if x.name in line.axes:
                panel.plot(
                    line.axes[x.name],
                    line.losses,
                    color=COLOURS[line.trainer % len(COLOURS)],
                    linewidth=0.8,
                    alpha=0.35,
                    label=f"steps of trainer {line.trainer}",
                )
        draw_over(panel, x, trained, records, color=GREY, marker=".", label="mean of a round")
        draw_over(
            panel, x, measured, records, color="black", linewidth=2, marker=".", label="validation"
        )
        label_axis(panel, x, f"loss ({measured.unit.name})" if index % 2 == 0 else "")
        for measure in measures if index % 2 else ():
            if measure.of_loss:
                scale = panel.secondary_yaxis("right")
                scale.set_ylabel(measure.axis)
                scale.yaxis.set_major_formatter(FuncFormatter(partial(_tick, measure.of_loss)))
    for panel in panels[len(x_axes) :]:
        panel.remove()
    share_legend(figure)
    return figure


def _tick(of_loss: Callable[[float], float], loss: float, _: int) -> str:
    return f"{of_loss(loss):.3g}"
