"""The time of a round in closed form: computation, waiting for the slowest worker, transfers, and
rounds that are lost to failures. `tests/plan/simulation.py` plays the same round event by event.

Computation. The seconds of inner steps are independent, with a mean and a standard deviation
(`jitter` times the mean). Workers wait for one another where one of the F fragments leaves, where
one arrives late, and at the end of the round. A stretch of steps in between takes the expected
largest of W normal sums.

Transfers. Each fragment is in flight while tau steps are trained, and only what takes longer is
waited for. Plain syncs have F = 1 and tau = 0. Data-parallel training syncs in each step, and its
gradients, unless they are sharded, leave in buckets during the backward pass
(`plan/gradient_buckets.py`).

Failures come at a rate R to the whole cluster, independently of each other; a round in which one
comes is trained again after a restart. A round of T seconds then takes
(e^(R T) - 1) (1 / R + restart) on average: the mean time until a gap of T seconds between failures.

This is exact without jitter, and nearly so with it: sums of few steps are skewed, and a transfer
that takes about as long as the steps beside it is late by chance (docs/plan.md has figures).
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from adloco.plan.cluster import Cluster
from adloco.plan.gradient_buckets import Buckets
from adloco.rules.sync_schedule import Streaming


@dataclass(frozen=True, kw_only=True)
class Sync:
    """The exchange of workers at the end of a round."""

    workers: int
    """Workers that exchange with one another (those of a trainer)."""
    bytes_sent: float
    """Bytes that leave each worker in a round."""
    fragments: int = 1
    """Parts that are sent one after another."""
    tau: int = 0
    """Inner steps during which a part is in flight."""
    hidden_steps: float = 0.0
    """Inner steps beside which the bytes of a part are in flight, but not its latencies, where
    measured rounds say so."""
    exchanges: int = 1
    """Exchanges one after another, whose latencies add up."""
    buckets: Buckets | None = None
    """Buckets that leave during a round of one step; None: everything leaves at its end."""

    def seconds(self, cluster: Cluster) -> tuple[float, float]:
        """Seconds in which a fragment's bytes are in flight, and those that it takes besides.

        These are `sync_seconds` and latencies: 2 (workers - 1) of them for each exchange in a ring,
        and 2 all to all.
        """
        if self.workers == 1:
            return 0.0, 0.0
        link = cluster.link
        latencies = link.seconds(0.0, self.workers, self.exchanges, cluster.pattern)
        in_flight = self.bytes_sent / self.fragments / link.bytes_per_second
        return in_flight, cluster.sync_seconds + latencies


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Mean seconds of a round, by what they are spent on."""

    computing: float
    """Seconds of inner steps, the mean over workers."""
    waiting: float
    """Seconds in which workers wait for the slowest of them."""
    transfer: float
    """Seconds of transfers during which nothing is trained."""
    lost: float
    """Seconds of rounds that are trained again, and of restarts."""

    @property
    def total(self) -> float:
        """All seconds of a round."""
        return self.computing + self.waiting + self.transfer + self.lost

    @property
    def utilisation(self) -> float:
        """Computing seconds over all seconds."""
        return self.computing / self.total


def round_time(
    cluster: Cluster, step_seconds: Sequence[float], sync_every: int, sync: Sync
) -> RoundTime:
    """The mean time of a round.

    Args:
        step_seconds: Mean seconds of an inner step of each worker.
        sync_every: H, inner steps of a round.
    """

    def slowest(steps: int) -> float:
        return expected_largest(
            tuple(steps * seconds for seconds in step_seconds),
            tuple(math.sqrt(steps) * cluster.jitter * seconds for seconds in step_seconds),
        )

    transfer, besides = sync.seconds(cluster)
    transfer = max(0.0, transfer - sync.hidden_steps * slowest(1))
    if sync.buckets:
        late = sync.buckets.late(transfer, slowest(1)) + besides
    else:
        beside = min(sync.tau, sync_every // sync.fragments)  # Fewer in a round that is cut short.
        late = max(0.0, transfer + besides - slowest(beside))
    events = Streaming(fragments=sync.fragments, tau=sync.tau).events(sync_every)
    meetings = [event.step for event in events if late or event.kind != "receive"]
    bounds = itertools.pairwise([0, *meetings, sync_every])
    stretches = Counter(end - begin for begin, end in bounds)
    trained = sum(count * slowest(steps) for steps, count in stretches.items())
    computing = sync_every * sum(step_seconds) / len(step_seconds)
    waited = sync.fragments * late
    undisturbed = trained + waited
    with_failures = undisturbed
    if rate := cluster.failures_per_second:
        # Capped, so that all rounds of a run together stay finite.
        exponent = min(rate * undisturbed, 300.0)
        with_failures = math.expm1(exponent) * (1 / rate + cluster.restart_seconds)
    return RoundTime(
        computing=computing,
        waiting=trained - computing,
        transfer=waited,
        lost=with_failures - undisturbed,
    )


def mean_round(
    cluster: Cluster, step_seconds: Sequence[float], sync_every: float, sync: Sync
) -> RoundTime:
    """The mean time of rounds that have so many inner steps on average, for which see
    `round_time`: between those of the whole numbers beside it.
    """
    steps = math.floor(sync_every)
    part = sync_every - steps
    shorter = round_time(cluster, step_seconds, steps, sync)
    if not part:
        return shorter
    longer = asdict(round_time(cluster, step_seconds, steps + 1, sync))
    return RoundTime(
        **{
            name: (1 - part) * seconds + part * longer[name]
            for name, seconds in asdict(shorter).items()
        }
    )


@functools.lru_cache(maxsize=4096)  # A plan asks again for each bandwidth.
def expected_largest(means: tuple[float, ...], deviations: tuple[float, ...]) -> float:
    """The expected largest of independent normal numbers, by quadrature of
    integral of 1 - product of their distribution functions.
    """
    largest, widest = max(means), max(deviations)
    if len(means) == 1 or widest == 0:
        return largest
    # Outside of 9 deviations of any of them the integrand is 0 or 1.
    low, high = largest - 9 * widest, largest + 9 * widest
    points = torch.linspace(low, high, 4001, dtype=torch.float64)
    below = torch.ones_like(points)
    for (mean, deviation), count in Counter(zip(means, deviations, strict=True)).items():
        below *= torch.special.ndtr((points - mean) / deviation) ** count
    return low + float(torch.trapezoid(1 - below, points))
