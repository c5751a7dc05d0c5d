"""A simulation of the rounds of a trainer over a described cluster, event by event. It is the check
of the closed form in `plan/round_time.py`, which says where the two differ.

A worker trains up to each event of the schedule (`rules/sync_schedule.py`). Where a fragment leaves
and at the end of the round it waits for the others; where one arrives it waits for the transfer if
that is late. No fragment leaves before the last one has arrived, so an uplink carries one transfer
at a time. A transfer is played in one piece: links are alike and every hop of a ring or of an
all-to-all waits for all workers, so hop by hop it would end at the same time.

Seconds of inner steps are gamma distributed. A failure of any island, at exponentially distributed
times except while they restart, throws all workers back to the beginning of their round.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from adloco.plan.cluster import Cluster
from adloco.plan.round_time import RoundTime, Sync
from adloco.rules.sync_schedule import Streaming


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Results of a simulation."""

    time: RoundTime
    """Seconds of a round, the mean over rounds and workers."""
    errors: Mapping[str, float]
    """Standard error of each of its parts and of their total, by name."""


def simulate(
    cluster: Cluster, step_seconds: Sequence[float], sync_every: int, sync: Sync, *, rounds: int
) -> Simulated:
    """Simulate so many rounds; the other arguments are those of `round_time`."""
    played = [*islice(_rounds(cluster, np.array(step_seconds), sync_every, sync), rounds)]
    names = [*(field.name for field in fields(RoundTime)), "total"]
    seconds = np.array([[getattr(time, name) for name in names] for time in played])
    means = dict(zip(names, seconds.mean(axis=0).tolist(), strict=True))
    errors = (seconds.std(axis=0, ddof=1) / math.sqrt(rounds)).tolist()
    del means["total"]
    return Simulated(time=RoundTime(**means), errors=dict(zip(names, errors, strict=True)))


def _rounds(
    cluster: Cluster, means: np.ndarray, sync_every: int, sync: Sync
) -> Iterator[RoundTime]:
    """The seconds of rounds, as means over workers whose steps take so long on average."""
    random, failures = np.random.default_rng(0), np.random.default_rng([0, 1])
    rate = cluster.failures_per_second

    def next_failure(up: float) -> float:
        return up + failures.exponential(1 / rate) if rate else math.inf

    now, fails = 0.0, next_failure(0.0)
    while True:
        began = now
        computing, transfer, end = _attempt(cluster, means, sync_every, sync, random, now)
        while end >= fails:
            now = fails + cluster.restart_seconds
            fails = next_failure(now)
            computing, transfer, end = _attempt(cluster, means, sync_every, sync, random, now)
        waiting = max(0.0, end - now - computing - transfer)
        yield RoundTime(computing=computing, transfer=transfer, waiting=waiting, lost=now - began)
        now = end


def _attempt(
    cluster: Cluster,
    means: np.ndarray,
    sync_every: int,
    sync: Sync,
    random: np.random.Generator,
    began: float,
) -> tuple[float, float, float]:
    """Play a round once.

    Returns:
        A worker's mean computing seconds, seconds by which transfers outlast the training beside
        them, and when the last worker finishes.
    """
    transfer, besides = sync.seconds(cluster)
    times, computing = np.full(len(means), began), np.zeros(len(means))
    done, arrives, late = 0, began, 0.0
    for event in Streaming(fragments=sync.fragments, tau=sync.tau).events(sync_every):
        steps, done = event.step - done, event.step
        # A step's seconds are gamma distributed, and so is their sum: it takes a single draw.
        wide = cluster.jitter**2
        seconds = random.gamma(steps / wide, means * wide) if wide else steps * means
        computing += seconds
        if sync.buckets:
            for part, leaves in zip(sync.buckets.parts, sync.buckets.leave_at(), strict=True):
                arrives = max(arrives, (times + leaves * seconds).max()) + part * transfer
        times = times + seconds
        if event.kind != "receive":
            times[:] = times.max()
            arrives = (arrives if sync.buckets else times.max() + transfer) + besides
        if event.kind != "send":
            late += max(0.0, arrives - times.max())
            times = np.maximum(times, arrives)
    return float(computing.mean()), float(late), float(times.max())
