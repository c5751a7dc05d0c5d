"""The rounds of a trainer, played event by event with SimPy.

A worker trains up to each event of the schedule (`rules/sync_schedule.py`). Where a fragment leaves
and at the end of the round it waits for the others of its trainer; where one arrives it waits for
the transfer if that is late. No fragment leaves before the last one has arrived, so an uplink
carries one transfer at a time.

A transfer is played in one piece. Links are alike and every hop of a ring or of an all-to-all waits
for all workers, so hop by hop it would end at the same time.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from adloco.plan.cluster import Cluster
from adloco.plan.gradient_buckets import Buckets
from adloco.plan.round_time import RoundTime, Sync
from adloco.rules.sync_schedule import Streaming, SyncEvent

Waits = Generator[simpy.Event, object, None]
"""A SimPy process: it yields the events that it waits for."""


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """What the workers of a trainer do in a round."""

    step_seconds: Sequence[float]
    """Mean seconds of an inner step of each worker."""
    jitter: float
    """Standard deviation of a step's seconds over their mean."""
    schedule: Sequence[SyncEvent]
    """Departures and arrivals of fragments."""
    fragments: int
    """Fragments of a round."""
    transfer_seconds: float
    """Seconds of the transfer of a fragment's bytes."""
    besides_seconds: float
    """Seconds that an exchange takes besides."""
    buckets: Buckets | None
    """Buckets that leave during a round of one step; None: everything leaves at its end."""

    @staticmethod
    def of(
        cluster: Cluster, step_seconds: Sequence[float], sync_every: int, sync: Sync
    ) -> "RoundWork":
        """The work of a trainer on a cluster; the arguments are those of `round_time`."""
        transfer, besides = sync.seconds(cluster)
        return RoundWork(
            step_seconds=step_seconds,
            jitter=cluster.jitter,
            schedule=Streaming(fragments=sync.fragments, tau=sync.tau).events(sync_every),
            fragments=sync.fragments,
            transfer_seconds=transfer,
            besides_seconds=besides,
            buckets=sync.buckets,
        )

    def draw_seconds(self, worker: int, steps: int, random: np.random.Generator) -> float:
        """Seconds of consecutive inner steps of a worker.

        A step's seconds are gamma distributed, and so is their sum: it takes a single draw.
        """
        mean = self.step_seconds[worker]
        if self.jitter == 0:
            return steps * mean
        return float(random.gamma(steps / self.jitter**2, mean * self.jitter**2))


class SimulatedTrainer:
    """A trainer that trains one round after another on islands that fail."""

    def __init__(
        self, env: simpy.Environment, workload: RoundWork, random: np.random.Generator
    ) -> None:
        self.num_workers = len(workload.step_seconds)
        self.rounds: list[RoundTime] = []
        """The seconds of each round that is done, as means over workers."""
        self._env, self._workload, self._random = env, workload, random
        self._up_at = [0.0] * self.num_workers
        self._attempt: _Attempt | None = None

    def run(self, rounds: int) -> Waits:
        """Train this many rounds. One in which all workers failed is tried again."""
        for _ in range(rounds):
            began = self._env.now
            while True:
                begins = max(self._env.now, min(self._up_at))
                yield self._env.timeout(begins - self._env.now)
                workers = [worker for worker, at in enumerate(self._up_at) if at <= begins]
                attempt = _Attempt(self._env, self._workload, self._random, workers)
                self._attempt = attempt
                yield attempt.over
                if attempt.finished:
                    break
            self.rounds.append(attempt.round_time(began, self.num_workers))

    def is_up(self, worker: int) -> bool:
        """True if the worker's island has not failed, or has restarted since."""
        return self._up_at[worker] <= self._env.now

    def fail(self, worker: int, restart_seconds: float) -> None:
        """Take a worker out of the round in progress and of those that begin before it is up."""
        self._up_at[worker] = self._env.now + restart_seconds
        if self._attempt:
            self._attempt.interrupt(worker)


class _Meeting:
    """A point of a round that is reached once no worker of the round is missing there."""

    def __init__(self, env: simpy.Environment, workers: Iterable[int]) -> None:
        self.reached = env.event()
        self.reached_at = math.inf
        """Time of the event."""
        self._env, self._missing = env, set(workers)

    def join(self, worker: int) -> simpy.Event:
        """Come to the point.

        Returns:
            The event that nobody is missing.
        """
        self._missing.discard(worker)
        if not self._missing and not self.reached.triggered:
            self.reached_at = self._env.now
            self.reached.succeed()
        return self.reached


class _Attempt:
    """An attempt of some workers at a round."""

    def __init__(
        self,
        env: simpy.Environment,
        workload: RoundWork,
        random: np.random.Generator,
        workers: Sequence[int],
    ) -> None:
        self.finished: list[int] = []
        """Workers that came to the end of the round."""
        self._env, self._workload, self._random = env, workload, random
        self._began = env.now
        self._computing = dict.fromkeys(workers, 0.0)
        self._transfer = 0.0
        fragments = range(workload.fragments)
        self._departures = [_Meeting(env, workers) for _ in fragments]
        parts = workload.buckets.parts if workload.buckets else ()
        self._full = [_Meeting(env, workers) for _ in parts]
        self._arrivals = [_Meeting(env, workers) for _ in fragments]
        self._end = _Meeting(env, workers)
        self._exchanges = [env.process(self._exchange(fragment)) for fragment in fragments]
        self._processes = {worker: env.process(self._work(worker)) for worker in workers}
        self.over = env.all_of(self._processes.values())
        """Every worker has finished or failed."""

    def interrupt(self, worker: int) -> None:
        """Let a worker fail if it takes part."""
        process = self._processes.get(worker)
        if process and process.is_alive:
            process.interrupt()

    def round_time(self, began: float, num_workers: int) -> RoundTime:
        """The seconds of the round that ends now, as means over all workers of the trainer.

        All seconds of a worker that did not finish are lost, and those before this attempt.

        Args:
            began: Time at which the round's first attempt began.
            num_workers: Workers of the trainer, those that did not take part included.
        """
        share = len(self.finished) / num_workers
        seconds = share * (self._env.now - self._began)
        computing = sum(self._computing[worker] for worker in self.finished) / num_workers
        transfer = share * self._transfer
        return RoundTime(
            computing=computing,
            waiting=max(0.0, seconds - computing - transfer),
            transfer=transfer,
            lost=self._env.now - began - seconds,
        )

    def _work(self, worker: int) -> Waits:
        try:
            yield from self._train_and_sync(worker)
            self.finished.append(worker)
        except simpy.Interrupt:
            for meeting in (*self._full, *self._departures, *self._arrivals, self._end):
                meeting.join(worker)

    def _train_and_sync(self, worker: int) -> Waits:
        done = 0
        for event in self._workload.schedule:
            seconds = self._workload.draw_seconds(worker, event.step - done, self._random)
            self._computing[worker] += seconds
            done = event.step
            yield from self._train(worker, seconds)
            if event.kind != "receive":
                yield self._departures[event.fragment].join(worker)
            if event.kind != "send":
                self._arrivals[event.fragment].join(worker)
                yield self._exchanges[event.fragment]
        yield self._end.join(worker)

    def _train(self, worker: int, seconds: float) -> Waits:
        """Train up to an event; buckets of gradients leave meanwhile."""
        buckets, done = self._workload.buckets, 0.0
        if buckets:
            for full, leaves in zip(self._full, buckets.leave_at(), strict=True):
                yield self._env.timeout((leaves - done) * seconds)
                full.join(worker)
                done = leaves
        yield self._env.timeout((1 - done) * seconds)

    def _exchange(self, fragment: int) -> Waits:
        """Transfer a fragment, or the buckets of a step. What outlasts the training of all workers
        counts as transfer.
        """
        work = self._workload
        if work.buckets:
            for full, part in zip(self._full, work.buckets.parts, strict=True):
                yield full.reached
                yield self._env.timeout(part * work.transfer_seconds)
        else:
            yield self._departures[fragment].reached
            yield self._env.timeout(work.transfer_seconds)
        yield self._env.timeout(work.besides_seconds)
        self._transfer += max(0.0, self._env.now - self._arrivals[fragment].reached_at)
