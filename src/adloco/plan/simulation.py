"""A simulation of the rounds of a run over a described cluster, event by event. It is the check of
the closed form in `plan/round_time.py`, which says where the two differ.

Seconds of inner steps are gamma distributed. Islands fail independently of each other, at
exponentially distributed times, except while they restart. Trainers sync at their own times; they
share the failures, since a run fails as a whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from adloco.errors import require
from adloco.plan.cluster import Cluster
from adloco.plan.round_time import RoundTime, Sync, round_time

if TYPE_CHECKING:
    import simpy

    from adloco.plan.simulated_trainer import SimulatedTrainer, Waits

OnFailure = Literal["repeat", "drop"]
"""repeat: all trainers restart, and each repeats the round it was in; drop: only the failed island
restarts, and its trainer's other workers go on without it until their next round.
"""
MOST_FAILURES = 3.0
"""Mean number of failures in the time of a round; e to this power is the number of attempts."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a simulation found."""

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
        ValueError: The package simpy is missing, islands and workers are not equally many, there
            are fewer than two rounds, or failures let hardly any round end.
    """
    try:
        import simpy

        from adloco.plan.simulated_trainer import RoundWork, SimulatedTrainer
    except ImportError as error:
        raise ValueError(
            "the simulation needs simpy; install it with: pip install 'adloco[plan]'"
        ) from error
    num_workers = [sync.workers for sync in syncs]
    require(
        sum(num_workers) == len(step_seconds) == cluster.islands,
        f"each of the {cluster.islands} islands needs its step_seconds and one worker of a "
        f"trainer, got {len(step_seconds)} step_seconds and trainers of {num_workers} workers",
    )
    require(rounds >= 2, f"rounds must be >= 2 for a standard error, got {rounds}")
    env, random = simpy.Environment(), np.random.default_rng(seed)
    trainers, islands = [], iter(step_seconds)
    for sync in syncs:
        own = tuple(islice(islands, sync.workers))
        _require_rounds_that_end(cluster, round_time(cluster, own, sync_every, sync), on_failure)
        trainers.append(SimulatedTrainer(env, RoundWork.of(cluster, own, sync_every, sync), random))
    if cluster.failures_per_second:
        env.process(_failures(env, cluster, trainers, random, on_failure))
    env.run(env.all_of([env.process(trainer.run(rounds)) for trainer in trainers]))
    return _summary(trainers)


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
    env: "simpy.Environment",
    cluster: Cluster,
    trainers: Sequence["SimulatedTrainer"],
    random: np.random.Generator,
    on_failure: OnFailure,
) -> "Waits":
    """The process that lets islands fail."""
    islands = [(trainer, worker) for trainer in trainers for worker in range(trainer.num_workers)]
    while True:
        yield env.timeout(random.exponential(1 / cluster.failures_per_second))
        trainer, worker = islands[random.integers(len(islands))]
        if trainer.is_up(worker):
            for hit, place in islands if on_failure == "repeat" else [(trainer, worker)]:
                hit.fail(place, cluster.restart_seconds)


def _summary(trainers: Sequence["SimulatedTrainer"]) -> Simulated:
    names = [field.name for field in fields(RoundTime)]
    seconds = np.average(
        [
            [[getattr(time, name) for name in (*names, "total")] for time in trainer.rounds]
            for trainer in trainers
        ],
        axis=0,
        weights=[trainer.num_workers for trainer in trainers],
    )
    means = seconds.mean(axis=0)
    errors = seconds.std(axis=0, ddof=1) / math.sqrt(len(seconds))
    return Simulated(
        time=RoundTime(**dict(zip(names, means[:-1].tolist(), strict=True))),
        errors=dict(zip((*names, "total"), errors.tolist(), strict=True)),
    )
