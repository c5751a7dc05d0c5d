"""The curves of plan.html: methods against bandwidth, and candidates with their Pareto front."""

import math
from collections.abc import Iterable, Mapping

from adloco.metrics import Metric, Unit
from adloco.plan.advice import pareto
from adloco.plan.cluster_plan import BANDWIDTHS, Plan
from adloco.plan.prediction import Prediction
from adloco.report.curves import Chart, Curve, Look, Panel
from adloco.report.readable import BYTES, COUNTS, RATES, TIMES, readable, unit_for

LONGEST = 1000 * TIMES["y"]
"""Seconds above which a time is not drawn: where nearly every round fails, it has no bound."""
OVER_BANDWIDTH = ("seconds", "bytes_sent", "price")
AMONG_CANDIDATES = ("bytes_sent", "tokens", "loss")
"""Numbers that are shown over the time, candidate by candidate."""


def plan_curves(plan: Plan) -> Panel:
    """The page's chart, with what it shows."""
    metrics = _metrics(plan)
    axes = {"bandwidth": metrics.pop("bandwidth")}
    axes["seconds"] = metrics["seconds"]
    curves = [*_over_bandwidth(plan, metrics), *_among_candidates(plan, metrics)]
    caption = (
        "Against bandwidth, a line is a method with its best settings at each bandwidth. Against "
        "time, a point is a candidate on this cluster; no other one is better than one of the "
        "Pareto front in all of these numbers at once."
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


def _among_candidates(plan: Plan, metrics: Mapping[str, Metric]) -> Iterable[Curve]:
    drawn = [one for one in plan.predictions if one.seconds <= LONGEST]
    shown = [name for name in AMONG_CANDIDATES if name in metrics]
    methods = dict.fromkeys(one.candidate.name for one in drawn)
    groups: list[tuple[str, list[Prediction], Look]] = [
        *(
            (name, [one for one in drawn if one.candidate.name == name], "points")
            for name in methods
        ),
        ("Pareto front", pareto(drawn), "marks"),
        ("recommended", [plan.chosen], "strong"),
    ]
    for name, found, look in groups:
        yield Curve(
            name=name,
            axes={"seconds": [one.seconds for one in found]},
            measures={number: [getattr(one, number) for one in found] for number in shown},
            look=look,
            notes=[one.candidate.label for one in found],
        )
