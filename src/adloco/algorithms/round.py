"""One round of AdLoCo (arXiv 2508.18182, algorithm 1): `Round.run` is the algorithm.

Plan the batches; train every worker for H inner steps; sync each trainer's workers by an outer
step; let the batch rule set the next request; merge trainers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Event

from adloco.algorithms.merging import Merging, apply_merge
from adloco.algorithms.method import Batching
from adloco.algorithms.outer_sync import Syncing
from adloco.algorithms.planning import Planner, agreed_pass_limit
from adloco.algorithms.reporting import WorkerRound, report_round, report_trainer
from adloco.algorithms.reports import RoundReport, TrainerReport
from adloco.algorithms.run_state import RunState
from adloco.algorithms.worker import RoundTask
from adloco.distributed.comm.metered import SyncMeter
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes
from adloco.rules.merge import Merge

Phase = Callable[[str], AbstractContextManager[object]]
Tasks = Mapping[int, RoundTask]
"""What each worker of the run does in a round."""


@dataclass(frozen=True, kw_only=True)
class RoundParts:
    """What the rounds of a run have in common."""

    planner: Planner
    batching: Batching
    syncing: Syncing
    merging: Merging
    placement: Placement
    meter: SyncMeter
    clock: Callable[[], float]
    base_rate: float
    """Learning rate of the inner optimizer at a factor of 1."""
    model_bytes: int
    """Size of the trainable parameters in the model's own type."""
    bytes_handed: Callable[[], Bytes]
    """Bytes of all ranks since the run began."""
    halted: Event = field(default_factory=Event)
    """Set to end the round in progress after the inner steps in progress."""


class Round:
    """A round in progress; `run` is called again after it was stopped."""

    def __init__(self, state: RunState, parts: RoundParts, inner_steps: int) -> None:
        """inner_steps: H of this round, unless the state is within one already."""
        self._state = state
        self._parts = parts
        self._limit_before = state.pass_limit
        self._training_seconds = 0.0
        if not state.in_round:
            state.round_steps, state.events_done = inner_steps, 0
            for worker in state.workers.values():
                worker.begin_round()

    def run(self, phase: Phase, *, last: bool) -> RoundReport | None:
        """Run the round, or what is left of it; None if it was stopped.

        Args:
            phase: Entered for "inner_steps" and for "sync", to measure them.
            last: Average diverged replicas at the end.
        """
        state, parts = self._state, self._parts
        tasks = self._plan()
        batches = {worker: task.plan.worker_batch for worker, task in tasks.items()}
        for event in parts.syncing.streaming.events(state.round_steps)[state.events_done :]:
            # Nobody stops while a fragment is in flight: a state to resume from has none.
            may_stop = event.kind != "receive"
            with phase("inner_steps"):
                self._train(tasks, until=event.step, halted=parts.halted if may_stop else Event())
            with phase("sync"), parts.meter.exposed():
                if may_stop and self._stopped():
                    return None
                synced = state.synced(batches, parts.placement, parts.meter)
                for trainer, replicas, weights, comm in synced:
                    trainer.outer.sync(event, replicas, weights, comm)
            self._count_sync()
            state.events_done += 1
        with phase("sync"):
            done = self._end(batches)
            trainers = self._request_batches(tasks, done)
            merge = self._merge(last)
            return self._report(tasks, done, trainers, merge)

    def _plan(self) -> Tasks:
        """Micro-batches and learning rates of every worker of the run."""
        state = self._state
        return self._parts.planner.tasks(
            state.trainers,
            state.speeds,
            samples=state.samples,
            steps_before=state.inner_steps,
            inner_steps=state.round_steps,
            pass_limit=state.pass_limit,
        )

    def _train(self, tasks: Tasks, until: int, halted: Event) -> None:
        """Inner steps of all workers here up to that one of the round, or until halted.

        A failure of one worker halts the others.
        """
        began = self._parts.clock()
        # All of them, also those that are there already: how many run at once must not change how
        # they compute.
        workers = list(self._state.workers.values())
        try:
            self._parts.placement.map(
                lambda worker: worker.advance(tasks[worker.id], until, halted),
                workers,
                on_failure=halted.set,
            )
        except BaseException:
            halted.clear()
            raise
        self._training_seconds += self._parts.clock() - began

    def _stopped(self) -> bool:
        """True if the round is to end on any rank. Waits for all of them."""
        stopped = self._parts.placement.any(self._parts.halted.is_set())
        if stopped:
            self._parts.halted.clear()
            self._agree_on_pass_limit()
        return stopped

    def _count_sync(self) -> None:
        workers = self._state.workers
        for worker, stats in zip(
            workers.values(), self._parts.meter.take(list(workers)), strict=True
        ):
            worker.count_sync(stats)

    def _end(self, batches: Mapping[int, float]) -> dict[int, WorkerRound]:
        """Average buffers, learn what every worker of the run did, and count the round."""
        state, parts = self._state, self._parts
        self._agree_on_pass_limit()
        synced = state.synced(batches, parts.placement, parts.meter)
        for trainer, replicas, weights, comm in synced:
            trainer.outer.average_buffers(replicas, weights, comm)
        longest = max(worker.busy_seconds for worker in state.workers.values())
        turns = max(1.0, self._training_seconds / max(longest, 1e-9))
        rows = parts.placement.gather(
            {
                worker.id: WorkerRound.of(worker, turns).to_numbers()
                for worker in state.workers.values()
            }
        )
        done = {worker: WorkerRound.from_numbers(row) for worker, row in rows.items()}
        state.last_samples = {worker: row.samples for worker, row in done.items()}
        state.rounds_done += 1
        state.inner_steps += state.round_steps
        state.samples += int(sum(state.last_samples.values()))
        sizes = [len(trainer.worker_ids) for trainer in state.trainers.values()]
        state.syncs += any(size > 1 for size in sizes)
        state.diverged = any(parts.syncing.diverges(size) for size in sizes)
        speeds = {worker: row.samples / row.turn_seconds for worker, row in done.items()}
        state.speeds = parts.batching.shares.update(state.speeds, speeds)
        state.round_steps = 0
        return done

    def _request_batches(
        self, tasks: Tasks, done: Mapping[int, WorkerRound]
    ) -> list[TrainerReport]:
        """Pool each trainer's gradient statistics; the batch rule sets its next request."""
        reports = []
        for trainer in self._state.trainers.values():
            rows = [done[worker] for worker in trainer.worker_ids]
            requested = trainer.requested_batch
            samples = int(sum(row.samples for row in rows))
            trainer.update_batch([row.moments for row in rows], samples)
            mine = [tasks[worker] for worker in trainer.worker_ids]
            reports.append(report_trainer(trainer, requested, mine, rows, self._parts.base_rate))
        return reports

    def _merge(self, last: bool) -> Merge | None:
        """Merge the trainers that the policy names, at their workers' mean."""
        state, parts = self._state, self._parts
        requests = {trainer.id: trainer.requested_batch for trainer in state.trainers.values()}
        merge = parts.merging.policy.decide(state.rounds_done, requests)
        if merge or last:
            average_replicas(state, parts)
        if merge:
            state.trainers = apply_merge(
                merge, state.trainers, state.workers, parts.merging.fates, parts.placement
            )
        return merge

    def _report(
        self,
        tasks: Tasks,
        done: Mapping[int, WorkerRound],
        trainers: Sequence[TrainerReport],
        merge: Merge | None,
    ) -> RoundReport:
        state, parts = self._state, self._parts
        return report_round(
            tasks,
            done,
            trainers,
            merge,
            state=state,
            new_limit=state.pass_limit if state.pass_limit != self._limit_before else 0,
            handed=parts.bytes_handed(),
            model_bytes=parts.model_bytes,
            placement=parts.placement,
        )

    def _agree_on_pass_limit(self) -> None:
        state = self._state
        limit = agreed_pass_limit(state.workers, state.pass_limit, self._parts.placement)
        state.pass_limit = limit


def average_replicas(state: RunState, parts: RoundParts) -> None:
    """Make the workers' mean each trainer's model, where syncs have left workers diverged.

    The mean is weighted by the last round's samples. Called on all ranks, between rounds.
    """
    if state.diverged:
        synced = state.synced(state.last_samples, parts.placement, parts.meter)
        for trainer, replicas, weights, comm in synced:
            trainer.outer.average_replicas(replicas, weights, comm)
    state.diverged = False
