"""The curves of plan.html: what each method takes against bandwidth, and all candidates with their
Pareto front.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from adloco.metrics import Metric, Unit
from adloco.plan.advice import pareto
from adloco.plan.cluster_plan import BANDWIDTHS, Plan
from adloco.plan.prediction import Prediction
from adloco.report.curves import Chart, Curve, Look, Panel
from adloco.report.readable import BYTES, COUNTS, RATES, TIMES, readable, unit_for

LONGEST = 1000 * TIMES["y"]
"""Seconds above which a time is not drawn: on a link where nearly every round fails, times grow
without bound."""
OVER_BANDWIDTH = ("seconds", "bytes_sent", "price")
AMONG_CANDIDATES = {"seconds": ("bytes_sent", "tokens", "loss"), "bytes_sent": ("loss",)}
"""Axis -> measures that are shown over it, candidate by candidate."""


def plan_curves(plan: Plan) -> Panel:
    """The page's chart, with what it shows."""
    metrics = _metrics(plan)
    axes = {"bandwidth": metrics.pop("bandwidth")}
    axes |= {axis: metrics[axis] for axis, over in AMONG_CANDIDATES.items() if {*over} & {*metrics}}
    curves = [*_over_bandwidth(plan, metrics), *_among_candidates(plan, axes, metrics)]
    caption = (
        "Against bandwidth, a line is a method with its best settings at each bandwidth. Against "
        "time or bytes, a point is a candidate on this cluster; no other one is better in both "
        "numbers than those on the Pareto front."
    )
    chart = Chart(axes=axes, measures=list(metrics.values()), curves=curves, log_x=True, log_y=True)
    return Panel(title="Time, bytes and price", caption=caption, charts=[chart])


def _metrics(plan: Plan) -> dict[str, Metric]:
    """The numbers that are shown, in units that suit the recommended candidate."""
    chosen = plan.chosen

    def metric(name: str, label: str, value: float, units: Mapping[str, float]) -> Metric:
        shown = unit_for(value, units)
        return Metric(name, label, Unit("", shown=shown, scale=units[shown]))

    link = 8 * plan.cluster.link.bytes_per_second
    metrics = [
        metric("bandwidth", "bandwidth", link, RATES),
        metric("seconds", "time to the target", chosen.seconds, TIMES),
        metric("bytes_sent", "left each island", chosen.bytes_sent, BYTES),
        metric("tokens", "tokens", chosen.tokens, COUNTS),
    ]
    if plan.cluster.price_per_hour:
        metrics.append(Metric("price", "price", Unit("")))
    if chosen.loss is not None:
        metrics.append(Metric("loss", "predicted loss", Unit("nats")))
    return {one.name: one for one in metrics}


def _over_bandwidth(plan: Plan, metrics: Mapping[str, Metric]) -> Iterable[Curve]:
    shown = [name for name in OVER_BANDWIDTH if name in metrics]
    lines = {
        name: [
            (bandwidth, one)
            for bandwidth, one in zip(BANDWIDTHS, found, strict=True)
            if one.seconds <= LONGEST
        ]
        for name, found in plan.over_bandwidth.items()
    }
    for name, line in lines.items():
        yield Curve(
            name=name,
            axes={"bandwidth": [bandwidth for bandwidth, _ in line]},
            measures={number: [getattr(one, number) for _, one in line] for number in shown},
            notes=[one.candidate.label for _, one in line],
        )
    drawn = [one for line in lines.values() for _, one in line]
    marks: list[tuple[str, float | None, Look]] = [
        ("this link", 8 * plan.cluster.link.bytes_per_second, "strong"),
        ("data-parallel training is as fast from", plan.crossing, "grey"),
    ]
    for mark, bandwidth, look in marks:
        if bandwidth and math.isfinite(bandwidth) and drawn:
            values = {number: [getattr(one, number) for one in drawn] for number in shown}
            yield Curve(
                name=f"{mark} {readable(bandwidth, RATES)}",
                axes={"bandwidth": [bandwidth, bandwidth]},
                measures={number: [min(those), max(those)] for number, those in values.items()},
                look=look,
            )


def _among_candidates(
    plan: Plan, axes: Mapping[str, Metric], metrics: Mapping[str, Metric]
) -> Iterable[Curve]:
    drawn = [one for one in plan.predictions if one.seconds <= LONGEST]
    for axis, over in AMONG_CANDIDATES.items():
        shown = [name for name in over if name in metrics]
        if axis not in axes:
            continue
        for method in dict.fromkeys(one.candidate.name for one in drawn):
            of_method = [one for one in drawn if one.candidate.name == method]
            yield _curve(method, of_method, axis, shown, "points")
        for number in shown:
            yield _curve("Pareto front", _front(drawn, axis, number), axis, [number], "strong")
        yield _curve("recommended", [plan.chosen], axis, shown, "strong")


def _front(predictions: Sequence[Prediction], axis: str, number: str) -> list[Prediction]:
    """The part of the Pareto front that is on it in two numbers alone, along the axis."""
    front: list[Prediction] = []
    for one in sorted(pareto(predictions), key=lambda one: (getattr(one, axis), _of(one, number))):
        if not front or _of(one, number) < _of(front[-1], number):
            front.append(one)
    return front


def _of(one: Prediction, number: str) -> float:
    value: float = getattr(one, number)
    return value


def _curve(
    name: str, found: Sequence[Prediction], axis: str, shown: Sequence[str], look: Look
) -> Curve:
    return Curve(
        name=name,
        axes={axis: [getattr(one, axis) for one in found]},
        measures={number: [getattr(one, number) for one in found] for number in shown},
        look=look,
        notes=[one.candidate.label for one in found],
    )
