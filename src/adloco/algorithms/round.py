"""One round of AdLoCo (arXiv 2508.18182, algorithm 1): `Round.run` is the algorithm.

Plan the batches; train every worker for H inner steps; sync each trainer's workers by an outer
step; let the batch rule set the next requested batch; merge trainers. A sync happens in events of
the schedule in `rules.sync_schedule`: fragments of the model are sent and received.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from threading import Event

from adloco.algorithms.make_reports import report_round, report_trainer
from adloco.algorithms.merging import apply_merge
from adloco.algorithms.reports import RoundReport, TrainerReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.trainer_distance import trainer_distances
from adloco.algorithms.worker_round import WorkerRound
from adloco.distributed.comm.sync_stats import SumStats, SyncStats
from adloco.rules.merge import Merge

Phase = Callable[[str], AbstractContextManager[object]]
"""(name of a phase) -> a context that is open during the phase, to measure it."""
Tasks = Mapping[int, RoundTask]
"""The task of each worker of the run in a round, by worker id."""


class Round:
    """A round in progress. If `run` was stopped, make it again from the state to continue it."""

    def __init__(
        self, state: RunState, parts: RoundParts, inner_steps: int, final_samples: int
    ) -> None:
        """
        Args:
            state: The run's state, between rounds or within the round to continue.
            inner_steps: H of a new round; ignored if the state is within a round.
            final_samples: As in `RunState`, of a new round; ignored likewise.
        """
        self._state = state
        self._parts = parts
        if not state.in_round:
            state.last_batches, state.planned = {}, {}
            state.round_steps, state.final_samples = inner_steps, final_samples
            state.sync_every = parts.planner.steps_of_round(state.samples)
            state.events_done = 0
            for worker in state.workers.values():
                worker.begin_round()
            for stage in state.stages:
                stage.begin_round()

    def run(self, phase: Phase) -> RoundReport | None:
        """Run the round, or the rest of it, as `AdLoCo.round` says; None if it was stopped."""
        state, parts = self._state, self._parts
        # A round that was stopped plans again. Its steps have changed nothing that plans are made
        # of, but a resumed one may have lost workers, whose share of the batch the others take.
        tasks = parts.planner.tasks(state)
        state.planned = {worker: float(sum(task.batches)) for worker, task in tasks.items()}
        # Counts, of which `synced` makes shares.
        weights = given = parts.syncing.weights.of(state.planned)
        for event in parts.syncing.streaming.events(state.round_steps)[state.events_done :]:
            # No rank stops while a fragment is in flight, because a saved state cannot contain one.
            may_stop = event.kind != "receive"
            with phase("inner_steps"):
                self._train(tasks, until=event.step, halted=parts.halted if may_stop else Event())
            with phase("sync"):
                began = parts.clock()
                if may_stop and self._stopped():
                    self._count_sync({}, parts.clock() - began)  # Waited for the slowest rank.
                    return None
                if event.kind != "receive":  # What is received was weighted when it was sent.
                    weights = given
                    for stage in state.stages:
                        weights = stage.weights(event, weights)
                costs = {}
                for trainer, replicas, shares, comm in state.synced(parts.placement, weights):
                    costs[trainer.id] = trainer.outer.sync(event, replicas, shares, comm)
                exposed_seconds = parts.clock() - began
            self._count_sync(costs, exposed_seconds)
            state.events_done += 1
        with phase("sync"):
            for trainer, replicas, shares, comm in state.synced(parts.placement, weights):
                trainer.outer.average_buffers(replicas, shares, comm)
            done = self._gather(tasks)
            self._count_round(done)
            # In this order, because a merge goes by the requests that the tests of the round gave.
            trainers = self._request_batches(tasks, done)
            merge = self._merge()
            report = report_round(tasks, done, trainers, merge, state, parts)
            for stage in state.stages:
                report = stage.report(report)
            return report

    def _train(self, tasks: Tasks, until: int, halted: Event) -> None:
        """Train all workers of this process up to inner step `until` of the round, or until halted.

        A failure of one worker halts the others.
        """
        began = self._parts.clock()
        # Workers that have reached this step already are included, because the number of workers
        # decides how many threads each one computes with.
        workers = list(self._state.workers.values())
        try:
            self._parts.placement.map(
                lambda worker: worker.advance(tasks[worker.id], until, halted),
                workers,
                on_failure=halted.set,
                together=all(
                    worker.captures(tasks[worker.id].plan, shared=True) for worker in workers
                ),
                # While a thread compiles a model, none can call one that is compiled.
                apart=any(worker.engine.compiles for worker in workers),
            )
        except BaseException:
            halted.clear()
            raise
        seconds = self._parts.clock() - began
        for worker in workers:
            worker.round.rank_seconds += seconds

    def _stopped(self) -> bool:
        """True if any rank was told to stop. Waits for all ranks."""
        stopped = self._parts.placement.any(self._parts.halted.is_set())
        if stopped:
            self._parts.halted.clear()
        return stopped

    def _count_sync(self, costs: Mapping[int, SumStats | None], exposed_seconds: float) -> None:
        """Count what the sums of a sync have cost, by trainer; None where nothing was sent.

        exposed_seconds: For which training stopped here.
        """
        placement, ranks = self._parts.placement, self._parts.placement.ranks_per_worker
        found = dict.fromkeys(self._state.workers, SyncStats())
        for trainer, stats in costs.items():
            if stats:
                ids = self._state.trainers[trainer].worker_ids
                here = placement.local(ids)
                of_workers = stats.of_workers(ranks, crossing=len(here) < len(ids))
                found |= zip(here, of_workers, strict=True)
        waited = SyncStats(exposed_seconds=exposed_seconds / ranks)
        for worker in self._state.workers.values():
            # This rank has a part of the statistics; the ranks of the island add up theirs.
            whole = worker.engine.sum(astuple(found[worker.id] + waited))
            worker.round.sync += SyncStats(*whole)

    def _gather(self, tasks: Tasks) -> Mapping[int, WorkerRound]:
        """The numbers of all workers of the run in the round, by id. Waits for all ranks."""
        workers = self._state.workers.values()
        # A rank with more workers than cores trains them in turns. Its seconds over those of its
        # slowest worker say how many; a clock that stood still must not divide by zero.
        longest = max(worker.round.busy_seconds for worker in workers)
        turns = max(1.0, max(worker.round.rank_seconds for worker in workers) / max(longest, 1e-9))
        ended = {
            worker.id: replace(worker.round, turn_seconds=worker.round.busy_seconds * turns)
            for worker in workers
        }
        rows = self._parts.placement.gather(
            {worker: row.to_numbers() for worker, row in ended.items()}
        )
        return {
            worker: WorkerRound.from_numbers(row, tasks[worker].batches)
            for worker, row in rows.items()
        }

    def _count_round(self, done: Mapping[int, WorkerRound]) -> None:
        """Update the run's counters, and the speeds by which batches are split."""
        state, parts = self._state, self._parts
        state.last_batches = {worker: row.batches for worker, row in done.items()}
        state.rounds_done += 1
        state.inner_steps += state.round_steps
        state.samples += sum(row.samples for row in done.values())
        sizes = [len(trainer.worker_ids) for trainer in state.trainers.values()]
        state.syncs += state.will_sync
        state.diverged = any(parts.syncing.diverges(size) for size in sizes)
        speeds = {worker: row.samples / row.turn_seconds for worker, row in done.items()}
        state.speeds = parts.batching.shares.update(state.speeds, speeds)
        state.round_steps = state.final_samples = 0

    def _request_batches(
        self, tasks: Tasks, done: Mapping[int, WorkerRound]
    ) -> list[TrainerReport]:
        """Pool each trainer's gradient statistics, and let the batch rule set its next request."""
        state, parts = self._state, self._parts
        reports = []
        decay = parts.planner.decay(state.samples)
        distances = trainer_distances(state.trainers, state.workers, parts.placement)
        for trainer in state.trainers.values():
            rows = [done[worker] for worker in trainer.worker_ids]
            # The report has the request that was trained, not the one that the test leads to.
            requested = trainer.requested_batch
            samples = sum(row.samples for row in rows)
            trainer.update_batch([row.moments for row in rows], samples, decay)
            mine = [tasks[worker] for worker in trainer.worker_ids]
            distance = distances[trainer.id]
            report = report_trainer(trainer, requested, mine, rows, parts.base_rate, distance)
            reports.append(report)
        return reports

    def _merge(self) -> Merge | None:
        """Merge the trainers that the policy names, if any."""
        state, parts = self._state, self._parts
        requests = {trainer.id: trainer.requested_batch for trainer in state.trainers.values()}
        decided = parts.merging.policy.decide(state.rounds_done, requests)
        merge = decided and decided.checked(requests)
        if merge:
            state.trainers = apply_merge(
                merge, state.trainers, state.workers, parts.merging.fates, parts.placement
            )
        return merge
