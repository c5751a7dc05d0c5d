"""A plan: predictions of all candidates on a cluster and over bandwidths, the advice, and what was
assumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adloco.errors import require
from adloco.plan.advice import by_method, choose, find_crossing, reasons_for
from adloco.plan.candidates import Candidate
from adloco.plan.cluster import Cluster
from adloco.plan.fitted_link import FittedLinks
from adloco.plan.prediction import Prediction, Workload, predict, with_spread
from adloco.plan.target import Target

BANDWIDTHS = tuple(10 ** (6 + step / 4) for step in range(21))
"""Bandwidths in bits/s of the plan's curves: 1 Mbit/s to 100 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for a cluster, and a recommendation."""

    cluster: Cluster
    workload: Workload
    target: str
    """The target in words."""
    predictions: Sequence[Prediction]
    """Predictions of all candidates that fit, on the cluster's link."""
    chosen: Prediction
    """The recommended one."""
    reasons: tuple[str, ...]
    """Sentences about it."""
    crossing: float | None
    """Bandwidth in bits/s from which on data-parallel training is as fast, by `find_crossing`."""
    over_bandwidth: Mapping[str, Sequence[Prediction]]
    """Method -> its fastest at each of `BANDWIDTHS`; [bandwidths]."""
    assumptions: tuple[str, ...]
    """Sentences."""
    condition: str = ""
    """The batches for which alone the figures hold, as an end of a sentence; empty if the target
    knows what batches cost."""
    has_model: bool = True
    """False if the recipe's model is not the one that was planned."""


def make_plan(
    found: Sequence[Candidate],
    workload: Workload,
    cluster: Cluster,
    target: Target,
    measured: FittedLinks | None = None,
) -> Plan:
    """Predict all candidates, with what measured rounds say about the link, and recommend one.

    Raises:
        ValueError: No candidate reaches the target, or a batch is not known.
    """

    def predicted(on: Cluster) -> list[Prediction]:
        return [predict(candidate, workload, on, target, measured) for candidate in found]

    def on_bandwidth(bits_per_second: float) -> list[Prediction]:
        return predicted(replace(cluster, bandwidth=f"{bits_per_second / 1e3:.6f}kbit"))

    fitting = _that_fit(predicted(cluster), workload, cluster)
    predictions = [with_spread(one, target) for one in fitting]
    found = [one.candidate for one in predictions]
    choices = [by_method(on_bandwidth(bandwidth), within=1.0) for bandwidth in BANDWIDTHS]
    chosen = choose(predictions)
    reasons = [*reasons_for(chosen, predictions), _micro_batches(chosen, cluster)]
    if cluster.was_busy:
        reasons.insert(0, cluster.was_busy)
    condition = ""
    if not target.prices_batches:
        batches = [f"{batch:,.0f}" for batch in sorted({one.batch for one in predictions})]
        condition = f" with batches of {' or '.join(batches)} samples only"
        reasons.insert(
            0,
            f"The noise scale is missing, so all figures hold{condition}. Larger ones sync less "
            "often, in data-parallel training above all, for a price in tokens that is not known: "
            "give --noise-scale N (`adloco gradients RUN` measures it), or --runs with short runs.",
        )
    if chosen.spread and chosen.varies:
        least, most = chosen.spread
        upper = f"{most:.3g}" if math.isfinite(most) else "any number of"
        reasons.append(
            f"It could take {least:.3g} to {upper} times its {chosen.tokens:,.0f} tokens, and so "
            "of its time, bytes and price: 90% of the laws lie between that fit what was measured."
        )
    return Plan(
        cluster=cluster,
        workload=workload,
        target=target.name,
        predictions=predictions,
        chosen=chosen,
        reasons=tuple(reasons),
        crossing=find_crossing(on_bandwidth),
        over_bandwidth={name: [of[name] for of in choices] for name in by_method(predictions)},
        assumptions=(*_of_time(cluster), *target.assumptions),
        condition=condition,
    )


def _that_fit(
    predictions: Sequence[Prediction], workload: Workload, cluster: Cluster
) -> list[Prediction]:
    """The predictions whose memory an island has."""
    least = min(one.memory_bytes for one in predictions)
    room = cluster.memory_gib * 2**30 or math.inf
    require(
        least <= room,
        f"no candidate fits in the {cluster.memory_gib:g} GiB of an island: parameters, gradients "
        f"and optimizer states of {workload.parameters:g} parameters take {least / 2**30:.4g} GiB "
        "at least; give islands more ranks, or a smaller model",
    )
    return [one for one in predictions if one.memory_bytes <= room]


def _micro_batches(chosen: Prediction, cluster: Cluster) -> str:
    fastest, each = cluster.fastest_pass, chosen.batch / chosen.workers
    rate = each * len(chosen.step_seconds) / sum(chosen.step_seconds)
    return (
        f"An island takes {each:,.4g} sample{'s' if each != 1 else ''} in a step on average, in "
        f"micro-batches of at most {chosen.candidate.recipe.switch.b_max} on each rank "
        f"(switch.max_micro_batch), and trains {rate:,.4g} a second; of the passes of an island "
        f"that were measured, those of {fastest} samples are the fastest, with "
        f"{cluster.samples_per_second[fastest]:,.4g} a second (batch.initial sets the batch)."
    )


def _of_time(cluster: Cluster) -> list[str]:
    exchange = "in rings" if cluster.pattern == "ring" else "all to all"
    return [
        f"Every worker has an island of its own; they exchange {exchange} over links of "
        f"{cluster.bandwidth} and {cluster.latency} one way, which carry nothing else.",
        "The workers of a trainer take equal shares of its batch, or, with placement.balance = "
        "speed, shares in proportion to the speeds of their islands.",
        "In data-parallel training gradients leave in buckets of 25 MiB (the first: 1 MiB) in the "
        "backward pass, two thirds of the time of a micro-batch; with shards, after it, as if all "
        "layers were one: links with long latencies make them slower than that.",
        "Steps take independent times with the given jitter; encoding and decoding take none.",
        "A failure repeats the round of all islands; checkpoints and evaluations take no time.",
        "AdLoCo is taken after its last merge, with one trainer that has all workers.",
    ]
