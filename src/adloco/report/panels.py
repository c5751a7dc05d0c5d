"""The charts of a run other than that of its loss, all against tokens.

The tables of metrics.py say which numbers a panel shows (`Metric.panel`) and how they are labelled.
Each has a chart of its own, but for those in `TOGETHER`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from adloco.metrics import METRICS, ROUND, TRAINER, Metric, Record, Unit, rows, validation, values
from adloco.report.curves import Chart, Curve, Look, Panel
from adloco.run.memory_use import PHASES

X = {"tokens": ROUND["tokens"]}
ONLY_SEVERAL = ("trainers", "workers")
"""Panels that say nothing new of a single trainer or worker."""

TOGETHER = {
    "batch": ("requested_batch", "trainer_batch", "accumulation_steps"),
    "noise_scale": (
        *("grad_variance", "measured_grad_variance", "grad_norm_sq", "measured_grad_norm_sq"),
        "noise_scale",
    ),
    "communication": ("bytes_communicated", "bytes_inside", "bytes_ddp_equivalent"),
    "wire": ("cosine_similarity", "wire_error", "exposed_seconds", "hidden_seconds"),
}
"""Name of a panel -> its metrics that a function here draws, with marks or several in a chart."""

CAPTIONS = {
    "batch": (
        "Batch of each trainer",
        "What the batch rule requests, what is trained on, and in how many micro-batches. "
        "A triangle is a round that trained on less than was requested, because it was clipped to "
        "what fits in memory. Healthy: the request grows over a good part of the run, what is "
        "trained on follows it, and neither lies at batch.maximum for long.",
    ),
    "noise_scale": (
        "Gradient statistics",
        "What the batch rule knows of them from all tests so far. Points: what the tests of each "
        "round alone measured, where that was above zero. Thin lines: one standard deviation. The "
        "noise scale is S / |G|²: the batch beyond which more samples bring little. Healthy: it "
        "grows as the loss falls, because |G|² falls faster than S, and the requested batch "
        "follows it.",
    ),
    "trainers": (
        "Trainers",
        "Healthy: the losses stay within a few percent of one another. The distance to the mean "
        "may grow until a merge; if the loss of one trainer stays behind while its distance "
        "grows, it diverges.",
    ),
    "islands": (
        "Islands",
        "The loss on each island's own text, which no other island has. Healthy: all fall; if one "
        "rises while the others fall, the run forgets its text.",
    ),
    "workers": (
        "Workers",
        "Healthy: all wait about equally long, and for little of a round. A worker that never "
        "waits is the slowest; placement.balance gives it a smaller share.",
    ),
    "communication": (
        "Communication",
        "All since the start, for each worker (inside islands, for each rank). Healthy: what is "
        "sent stays far below what data-parallel training would have sent in as many steps. Each "
        "merge adds a step, because it averages whole models.",
    ),
    "wire": (
        "Syncs",
        "Healthy: the cosine is positive, about 0.1 to 0.2 with a few samples a worker and up to "
        "0.7 with many; near 0 the changes of the workers cancel. What the wire format loses "
        "stays below 100% (with wire.feedback it is sent later), and training waits for only a "
        "small part of the time.",
    ),
    "memory": (
        "Memory by phase of a round",
        "Healthy: level after the first rounds, or growing with the micro-batch alone. A peak that "
        "grows without a larger batch points to a leak.",
    ),
}
"""Name of a panel -> its title and caption."""


def run_panels(records: Sequence[Record], loss: Metric) -> list[Panel]:
    """The panels that have data, in the order of the page."""
    of_loss = [replace(validation(loss, per), panel=f"{per}s") for per in ("trainer", "island")]
    metrics = [*of_loss, *METRICS]
    makers: dict[str, Callable[[list[Metric], Sequence[Record]], list[Chart]]] = {
        "batch": _batch,
        "noise_scale": _statistics,
        "communication": _communication,
        "wire": _wire,
    }
    merges = {"tokens": [record["tokens"] for record in records if record["merges"]]}
    panels = []
    for name, (title, caption) in CAPTIONS.items():
        shown = [m for m in metrics if m.panel == name and any(map(any, values(m, records)))]
        alone = name in ONLY_SEVERAL and len(records[0][name]) == 1
        silent = name == "wire" and not any(record["sync"]["bytes"] for record in records)
        if shown and not alone and not silent:
            own = [metric for metric in shown if metric.name in TOGETHER.get(name, ())]
            charts = makers[name](own, records) if own else []
            charts += [
                _chart(m, _lines(m, records), from_zero=m.whole or m.per in ("worker", "phase"))
                for m in shown
                if m not in own
            ]
            marked = [replace(chart, marks=merges) for chart in charts]
            panels.append(Panel(title=title, caption=caption, charts=marked))
    return panels


def _batch(metrics: Sequence[Metric], records: Sequence[Record]) -> list[Chart]:
    """Requested and trained batch, and micro-batches."""
    requested, trained, passes = (TRAINER[name] for name in TOGETHER["batch"])
    clipped = [
        (record["tokens"], row[trained.name])
        for record in records
        for row in record["trainers"]
        if row[trained.name] < row[requested.name]
    ]
    marks = _curve("clipped", trained, clipped, "marks")
    charts = {
        requested: _lines(requested, records),
        trained: [*_lines(trained, records), *[marks] * bool(clipped)],
        passes: _lines(passes, records),
    }
    return [_chart(metric, curves, from_zero=True) for metric, curves in charts.items()]


def _statistics(metrics: Sequence[Metric], records: Sequence[Record]) -> list[Chart]:
    """S and |G|^2 with what each round's tests measured; the noise scale with its uncertainty."""
    charts = []
    for name in ("grad_variance", "grad_norm_sq"):
        metric = TRAINER[name]
        tests = [_renamed(each, name) for each in _lines(TRAINER[f"measured_{name}"], records)]
        curves = [*_lines(metric, records), *[replace(each, look="points") for each in tests]]
        charts.append(_chart(metric, curves, log_y=True))
    scale = TRAINER["noise_scale"]
    factors = {each.name: each for each in _lines(TRAINER["noise_scale_factor"], records)}
    curves = []
    for line in _lines(scale, records):
        factor = factors[line.name].measures["noise_scale_factor"]
        curves.append(line)
        for power, side in ((-1, "below"), (1, "above")):
            edge = [
                None if value is None or by is None else value * by**power
                for value, by in zip(line.measures[scale.name], factor, strict=True)
            ]
            detail = f"one standard deviation {side}"
            curves.append(replace(line, measures={scale.name: edge}, look="thin", detail=detail))
    return [*charts, _chart(scale, curves, log_y=True)]


def _renamed(curve: Curve, name: str) -> Curve:
    """The curve as one of another metric; without its values below zero, for a log axis."""
    (found,) = curve.measures.values()
    shown = [value if value is not None and value > 0 else None for value in found]
    return replace(curve, measures={name: shown}, detail="last tests")


def _communication(metrics: Sequence[Metric], records: Sequence[Record]) -> list[Chart]:
    sent = Metric("sent", "sent", ROUND["bytes_communicated"].unit)
    curves = [
        _curve(metric.label, sent, [(r["tokens"], r[metric.name] or None) for r in records])
        for metric in metrics
    ]
    return [_chart(sent, curves, log_y=bool(records[-1]["bytes_communicated"]))]


def _wire(metrics: Sequence[Metric], records: Sequence[Record]) -> list[Chart]:
    of_trainers = [metric for metric in metrics if metric.per == "trainer"]
    of_syncs = [metric for metric in metrics if metric.per == "sync"]
    time = Metric("seconds", "seconds of syncs per round", Unit("", ",.1f"))
    curves = [
        _curve(m.label, time, [(r["tokens"], r["sync"][m.name]) for r in records], "stairs")
        for m in of_syncs
    ]
    charts = [_chart(m, _lines(m, records), from_zero=True) for m in of_trainers]
    return [*charts, *[_chart(time, curves, from_zero=True)] * bool(curves)]


def _lines(metric: Metric, records: Sequence[Record]) -> list[Curve]:
    """A line per trainer, worker, island or phase, or one of the round. Counts, and all numbers of
    workers, are stairs, because they apply to the whole round.
    """
    if metric.per == "phase":
        kept = {phase: [one for one in records if phase in one["memory"]] for phase in PHASES}
        return [
            _curve(
                phase.replace("_", " "),
                metric,
                [(one["tokens"], one["memory"][phase][metric.name]) for one in found],
            )
            for phase, found in kept.items()
        ]
    look: Look = "stairs" if metric.whole or metric.per == "worker" else "line"
    names: dict[int | str | None, str] = {None: metric.label}  # Of the round, or of its syncs.
    if metric.per in ("trainer", "worker", "island"):
        numbers = {row[metric.per] for record in records for row in rows(record, metric.per)}
        names = {number: f"{metric.per} {number}" for number in sorted(numbers)}

    def points(number: int | str | None) -> list[tuple[float, float]]:
        found = zip(records, values(metric, records, number), strict=True)
        return [(record["tokens"], value) for record, of_round in found for value in of_round]

    return [_curve(name, metric, points(one), look) for one, name in names.items()]


def _curve(
    name: str, metric: Metric, points: Sequence[tuple[float, float | None]], look: Look = "line"
) -> Curve:
    return Curve(
        name=name,
        axes={"tokens": [x for x, _ in points]},
        measures={metric.name: [y for _, y in points]},
        look=look,
    )


def _chart(
    metric: Metric, curves: Sequence[Curve], *, log_y: bool = False, from_zero: bool = False
) -> Chart:
    return Chart(axes=X, measures=[metric], curves=curves, log_y=log_y, from_zero=from_zero)
