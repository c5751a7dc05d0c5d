"""A simulation of the rounds of a run over a described cluster, event by event. It is the check of
the closed form in `plan/round_time.py`, which says where the two differ.

A worker trains up to each event of the schedule (`rules/sync_schedule.py`). Where a fragment leaves
and at the end of the round it waits for the others of its trainer; where one arrives it waits for
the transfer if that is late. No fragment leaves before the last one has arrived, so an uplink
carries one transfer at a time. A transfer is played in one piece: links are alike and every hop of
a ring or of an all-to-all waits for all workers, so hop by hop it would end at the same time.

Seconds of inner steps are gamma distributed. Islands fail independently of each other, at
exponentially distributed times, except while they restart. Trainers sync at their own times; they
share the failures, since a run fails as a whole.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Literal

import numpy as np

from adloco.errors import require
from adloco.plan.cluster import Cluster
from adloco.plan.round_time import RoundTime, Sync, round_time
from adloco.rules.sync_schedule import Streaming

OnFailure = Literal["repeat", "drop"]
"""repeat: all trainers restart, and each repeats the round it was in; drop: only the failed island
restarts, and its trainer's other workers continue without it until their next round.
"""
MOST_FAILURES = 3.0
"""Mean number of failures in the time of a round; e to this power is the number of attempts."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Results of a simulation."""

    time: RoundTime
    """Seconds of a round, the mean over rounds and islands."""
    errors: Mapping[str, float]
    """Standard error of each of its parts and of their total, by name."""


def simulate(
    cluster: Cluster,
    step_seconds: Sequence[float],
    sync_every: int,
    syncs: Sequence[Sync],
    *,
    rounds: int = 200,
    seed: int = 0,
    on_failure: OnFailure = "repeat",
) -> Simulated:
    """Simulate the rounds of a run.

    Args:
        cluster: The islands and their link.
        step_seconds: Mean seconds of an inner step of each island.
        sync_every: H, inner steps of a round; 1 for data-parallel training.
        syncs: What each trainer exchanges; the first one has the first islands, and so on.
        rounds: Rounds of each trainer.
        seed: Seed of all random draws; equal seeds give equal results.
        on_failure: Who loses a round if an island fails.

    Raises:
        ValueError: Islands and workers are not equally many, there are fewer than two rounds, or
            failures let hardly any round end.
    """
    num_workers = [sync.workers for sync in syncs]
    require(
        sum(num_workers) == len(step_seconds) == cluster.islands,
        f"each of the {cluster.islands} islands needs its step_seconds and one worker of a "
        f"trainer, got {len(step_seconds)} step_seconds and trainers of {num_workers} workers",
    )
    require(rounds >= 2, f"rounds must be >= 2 for a standard error, got {rounds}")
    random, islands = np.random.default_rng(seed), iter(step_seconds)
    trainers = []
    for sync in syncs:
        own = tuple(islice(islands, sync.workers))
        _require_rounds_that_end(cluster, round_time(cluster, own, sync_every, sync), on_failure)
        if on_failure == "repeat":  # All islands of all trainers fail at the same times.
            failures = [_failures(cluster, cluster.islands, [seed, 1]) for _ in own]
        else:
            failures = [_failures(cluster, 1, random) for _ in own]
        played = _rounds(cluster, own, sync_every, sync, failures, random)
        trainers.append([*islice(played, rounds)])
    return _summary(trainers, num_workers)


def _require_rounds_that_end(cluster: Cluster, time: RoundTime, on_failure: OnFailure) -> None:
    seconds = time.computing + time.waiting + time.transfer
    failing = cluster.islands if on_failure == "repeat" else 1
    failures = seconds * cluster.failures_per_second * failing / cluster.islands
    require(
        failures <= MOST_FAILURES,
        f"hardly any round would end: in its {seconds:.3g} s there are {failures:.3g} failures on "
        f"average, and a simulation allows {MOST_FAILURES:g}; lower sync_every or failures_per_day",
    )


def _failures(
    cluster: Cluster, islands: int, seed: list[int] | np.random.Generator
) -> Iterator[float]:
    """The times at which one of so many islands fails; none fails until all have restarted."""
    rate = cluster.failures_per_second * islands / cluster.islands
    random, at = np.random.default_rng(seed), -cluster.restart_seconds
    while True:
        up = at + cluster.restart_seconds
        at = up + random.exponential(1 / rate) if rate else math.inf
        yield at


def _rounds(
    cluster: Cluster,
    step_seconds: Sequence[float],
    sync_every: int,
    sync: Sync,
    failures: Sequence[Iterator[float]],
    random: np.random.Generator,
) -> Iterator[RoundTime]:
    """The seconds of a trainer's rounds, as means over its workers.

    All seconds of a worker that did not finish a round are lost, and so are attempts at a round in
    which all workers failed. The first arguments are those of `round_time`.
    """
    means, now = np.array(step_seconds), 0.0
    fails = np.array([next(times) for times in failures])
    while True:
        began, finished = now, 0
        while not finished:
            # A worker takes part if its island is up; if none is, the first one is waited for.
            now = max(now, np.where(fails > now, now, fails + cluster.restart_seconds).min())
            for worker, times in enumerate(failures):
                while fails[worker] + cluster.restart_seconds <= now:
                    fails[worker] = next(times)
            up, attempt = fails > now, now
            computing, transfer, finished, now = _attempt(
                cluster, means[up], sync_every, sync, random, began=now, fails=fails[up]
            )
        share = finished / len(means)
        seconds = share * (now - attempt)
        spent = {"computing": computing / len(means), "transfer": share * transfer}
        waiting = max(0.0, seconds - sum(spent.values()))
        yield RoundTime(**spent, waiting=waiting, lost=now - began - seconds)


def _attempt(
    cluster: Cluster,
    means: np.ndarray,
    sync_every: int,
    sync: Sync,
    random: np.random.Generator,
    *,
    began: float,
    fails: np.ndarray,
) -> tuple[float, float, int, float]:
    """Play a round once. Nobody waits for a worker that has failed.

    Args:
        means: [workers] Mean seconds of an inner step.
        fails: [workers] When each worker's island fails next.

    Returns:
        Computing seconds of all workers that finish, seconds by which transfers outlast the
        training beside them, how many workers finish, and when the last one finishes or fails.
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
                full = np.minimum(times + leaves * seconds, fails).max()
                arrives = max(arrives, full) + part * transfer
        times = np.minimum(times + seconds, fails)
        if event.kind != "receive":
            left = times.max()
            times = np.minimum(left, fails)
            arrives = (arrives if sync.buckets else left + transfer) + besides
        if event.kind != "send":
            late += max(0.0, arrives - times.max())
            times = np.minimum(np.maximum(times, arrives), fails)
    end = float(times.max())
    finished = fails > end
    return float(computing[finished].sum()), float(late), int(finished.sum()), end


def _summary(trainers: Sequence[Sequence[RoundTime]], num_workers: Sequence[int]) -> Simulated:
    names = [*(field.name for field in fields(RoundTime)), "total"]
    each = [[[getattr(time, name) for name in names] for time in played] for played in trainers]
    seconds = np.average(each, axis=0, weights=num_workers)
    means = dict(zip(names, seconds.mean(axis=0).tolist(), strict=True))
    errors = (seconds.std(axis=0, ddof=1) / math.sqrt(len(seconds))).tolist()
    del means["total"]
    return Simulated(time=RoundTime(**means), errors=dict(zip(names, errors, strict=True)))
