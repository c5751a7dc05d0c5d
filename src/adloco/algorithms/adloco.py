"""AdLoCo (arXiv 2508.18182, algorithm 1): rounds of inner steps with adaptive batches, an outer
step per trainer, and merges. `AdLoCo.round` is the algorithm.

With one trainer and a constant batch this is DiLoCo; with a plain mean as the outer step, LocalSGD;
with one worker, plain training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

from torch import nn

from adloco.algorithms.building import build_workers, check_sections
from adloco.algorithms.evaluation import Share, evaluate
from adloco.algorithms.merging import Merging, apply_merge
from adloco.algorithms.method import Batching, Execution, Method, Problem
from adloco.algorithms.model_state import Replica
from adloco.algorithms.optimizers import InnerFactory, check_shards
from adloco.algorithms.outer_sync import OuterSync, Syncing
from adloco.algorithms.planning import Planner, agreed_pass_limit
from adloco.algorithms.reports import (
    RoundReport,
    TrainerReport,
    WorkerRound,
    report_round,
    report_trainer,
)
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import RoundTask
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.metered import SyncMeter
from adloco.distributed.parallel.layers import layers
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes, num_bytes
from adloco.errors import require
from adloco.rules.controller import BatchController
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge import Merge

Phase = Callable[[str], AbstractContextManager[object]]
Tasks = Mapping[int, RoundTask]
"""What each worker of the run does in a round."""


class AdLoCo:
    """A run: trainers x workers, trained round by round with `rounds`.

    Args:
        problem: Model, loss and data; at least one data stream for each worker.
        method: Trainers, workers and rounds.
        inner: Builds a worker's optimizers from its model.
        syncing: The outer optimizer, and how pseudo-gradients cross.
        batching: How batches are decided and carried out; a constant batch by default.
        merging: Which trainers merge; none by default.
        learning_rate: A schedule over the inner optimizers' own rates, in tokens.
        execution: Mixed precision, compilation, the seed of dropout.
        placement: Where workers live; this process by default.

    Raises:
        ValueError: For settings that cannot work together, in one sentence.
    """

    def __init__(
        self,
        problem: Problem,
        method: Method,
        *,
        inner: InnerFactory,
        syncing: Syncing,
        batching: Batching | None = None,
        merging: Merging | None = None,
        learning_rate: LearningRate | None = None,
        execution: Execution | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.method = method
        self.placement = placement or OneProcess()
        self._batching = batching or Batching()
        self._merging = merging or Merging()
        self._syncing = syncing
        execution = execution or Execution()
        check_sections(problem, method, self._batching, learning_rate, self.placement)
        self._planner = Planner(
            batching=self._batching,
            learning_rate=learning_rate,
            tokens_per_sample=problem.tokens_per_sample,
            ranks=self.placement.ranks_per_worker,
        )
        self.workers = build_workers(
            problem,
            method,
            inner=inner,
            syncing=syncing,
            batching=self._batching,
            execution=execution,
            placement=self.placement,
        )
        """Those that live in this process, by id."""
        first = next(iter(self.workers.values()))
        self.num_parameters = sum(parameter.numel() for parameter in first.replica.params)
        self._model, self._first_rate = first.model, first.base_rates[0][0]
        self._model_bytes = num_bytes(first.replica.params)
        self._fragments = syncing.streaming.cut(layers(first.model), method.sync_every)
        each = method.workers_per_trainer
        self.trainers = {
            trainer: self._new_trainer(trainer, range(trainer * each, (trainer + 1) * each))
            for trainer in range(method.num_trainers)
        }
        """The living ones, by id."""
        outers = [
            trainer.outer.optimizer for trainer in self.trainers.values() if trainer.outer.optimizer
        ]
        check_shards([*first.optimizers, *outers], self.placement.shards)
        self.rounds_done = self.samples = self.inner_steps = self.syncs = 0
        self.speeds: dict[int, float] = {}
        """Samples per second of each worker."""
        self.pass_limit = self._limit_before = 0
        self.round_steps = 0
        """Inner steps of the round in progress; 0 between rounds."""
        self._events_done = 0
        self._diverged = False
        """Whether workers differ from their trainer's global parameters between rounds."""
        self._last_samples: dict[int, float] = {}
        """Samples of each worker of the run in the last round."""
        self._training_seconds = 0.0
        self._clock = execution.clock
        self._meter = SyncMeter(self.placement.ranks_per_worker, execution.clock)
        self._bytes_before = self.placement.total_bytes()
        self._halted = Event()

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run this many rounds, or fewer if `stop` is called."""
        for _ in range(count):
            report = self.round()
            if report is None:
                return
            yield report

    def round(
        self, inner_steps: int | None = None, phase: Phase = nullcontext, *, last: bool = False
    ) -> RoundReport | None:
        """One round of algorithm 1, or what is left of it: None if `stop` was called.

        Args:
            inner_steps: H of this round; None: `method.sync_every`.
            phase: Entered for "inner_steps" and for "sync", to measure them.
            last: Average diverged replicas at the end.
        """
        if not self.in_round:
            self._begin_round(inner_steps or self.method.sync_every)
        tasks = self._plan()
        for event in self._syncing.streaming.events(self.round_steps)[self._events_done :]:
            with phase("inner_steps"):
                # Nobody stops while a fragment is in flight: a state to resume from has none.
                self._train(
                    tasks,
                    until=event.step,
                    halted=None if event.kind == "receive" else self._halted,
                )
            with phase("sync"), self._meter.exposed():
                if event.kind != "receive" and self._stopped():
                    return None
                for trainer, replicas, weights, comm in self._synced(self._batches(tasks)):
                    trainer.outer.sync(event, replicas, weights, comm)
            self._count_sync()
            self._events_done += 1
        with phase("sync"):
            done = self._end_round(tasks)
            trainers = self._request_batches(tasks, done)
            merge = self._merge_trainers(last)
            return self._report(tasks, done, trainers, merge)

    def stop(self) -> None:
        """End the round after the inner steps in progress; from any thread or signal handler.

        The state can then be saved and resumed. A fragment in flight arrives first.
        """
        self._halted.set()

    @property
    def in_round(self) -> bool:
        """True if a round has begun and not ended."""
        return self.round_steps > 0

    @property
    def samples_per_inner_step(self) -> int:
        """Samples that one inner step takes over all trainers, with the batches now in force."""
        return self._planner.samples_per_inner_step(self.trainers, self.speeds)

    @property
    def samples_so_far(self) -> int:
        """Samples trained on, with those of the round in progress of the workers in this process."""
        return self.samples + (
            sum(worker.round_samples for worker in self.workers.values()) if self.in_round else 0
        )

    def average_replicas(self) -> None:
        """Make the workers' mean each trainer's model, where syncs have left workers diverged.

        Called on all ranks, between rounds. The mean is weighted by the last round's samples.
        """
        require(not self.in_round, "a round is in progress; average replicas between rounds")
        if self._diverged:
            for trainer, replicas, weights, comm in self._synced(self._last_samples):
                trainer.outer.average_replicas(replicas, weights, comm)
        self._diverged = False

    def model(self, trainer: int) -> nn.Module:
        """A model with the trainer's global parameters, between rounds.

        Training goes on from it: copy it before you change it.
        """
        require(not self.in_round, "a round is in progress, and workers differ; ask between rounds")
        require(
            not self._diverged,
            "syncs have left the workers diverged; call average_replicas() first",
        )
        require(
            trainer in self.trainers,
            f"there is no trainer {trainer}; living ones are {sorted(self.trainers)}",
        )
        return self.workers[self.trainers[trainer].worker_ids[0]].model

    def evaluate(self, share: Share) -> dict[int, list[float]]:
        """Means of quantities for each trainer's global parameters, between rounds.

        The work is shared among the trainer's workers.
        """
        require(
            not self.in_round, "a round is in progress, and workers differ; evaluate between rounds"
        )
        return evaluate(self.trainers, self.workers, self.placement, share, diverged=self._diverged)

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit for bit, between rounds or, after `stop`, within one.

        Called on all ranks; complete on rank 0. Tensors are the live ones.
        """
        kept = [
            trainer
            for trainer in self.trainers.values()
            if self.placement.local(trainer.worker_ids[:1])
        ]
        with_params = self.in_round or self._diverged
        workers = [
            (str(worker.id), worker.state_dict(with_params=with_params))
            for worker in self.workers.values()
        ]
        return {
            "rounds_done": self.rounds_done,
            "samples": self.samples,
            "inner_steps": self.inner_steps,
            "syncs": self.syncs,
            "round_steps": self.round_steps,
            "events_done": self._events_done,
            "diverged": self._diverged,
            "pass_limit": self.pass_limit,
            "speeds": {str(worker): speed for worker, speed in self.speeds.items()},
            "bytes": list(self._bytes_handed()),
            "trainers": self.placement.collect(
                self.placement.gather_shards([trainer.state_dict() for trainer in kept])
            ),
            "workers": dict(self.placement.collect(self.placement.gather_shards(workers))),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Called on all ranks."""
        for trainer in self.trainers.values():
            trainer.outer.discard_in_flight()
        self.rounds_done, self.samples = state["rounds_done"], state["samples"]
        self.inner_steps, self.syncs = state["inner_steps"], state["syncs"]
        self.round_steps, self._events_done = state["round_steps"], state["events_done"]
        self.pass_limit = self._limit_before = state["pass_limit"]
        self.speeds = {int(worker): speed for worker, speed in state["speeds"].items()}
        self._bytes_before = self.placement.total_bytes() - Bytes(*state["bytes"])
        self._halted.clear()
        self._diverged = state["diverged"]
        workers = {int(worker): saved for worker, saved in state["workers"].items()}
        self._last_samples = {worker: saved["round_samples"] for worker, saved in workers.items()}
        saved_trainers = sorted(state["trainers"], key=lambda saved: int(saved["trainer"]))
        self.trainers = {
            int(saved["trainer"]): self._new_trainer(int(saved["trainer"]), range(0))
            for saved in saved_trainers
        }
        for trainer, saved in zip(self.trainers.values(), saved_trainers, strict=True):
            trainer.load_state_dict(saved)
            trainer.outer.broadcast_all(self._replicas(trainer))
        for worker in self.workers.values():
            worker.load_state_dict(workers[worker.id])

    def _begin_round(self, inner_steps: int) -> None:
        self.round_steps, self._events_done = inner_steps, 0
        self._limit_before = self.pass_limit
        self._training_seconds = 0.0
        for worker in self.workers.values():
            worker.begin_round()

    def _plan(self) -> Tasks:
        return self._planner.tasks(
            self.trainers,
            self.speeds,
            samples=self.samples,
            steps_before=self.inner_steps,
            inner_steps=self.round_steps,
            pass_limit=self.pass_limit,
        )

    def _train(self, tasks: Tasks, until: int, halted: Event | None) -> None:
        """Inner steps of all local workers up to that one of the round, or until halted."""
        stop = halted or Event()  # A failure of one worker halts the others.
        began = self._clock()
        try:
            # All of them, also those that are there already: how many run at once must not change
            # how they compute.
            self.placement.map(
                lambda worker: worker.advance(tasks[worker.id], until, stop),
                list(self.workers.values()),
                on_failure=stop.set,
            )
        except BaseException:
            stop.clear()
            raise
        self._training_seconds += self._clock() - began

    def _stopped(self) -> bool:
        """True if `stop` was called on any rank. Waits for all of them."""
        stopped = self.placement.any(self._halted.is_set())
        if stopped:
            self._halted.clear()
            self.pass_limit = agreed_pass_limit(self.workers, self.pass_limit, self.placement)
        return stopped

    def _count_sync(self) -> None:
        for worker, stats in zip(
            self.workers.values(), self._meter.take(list(self.workers)), strict=True
        ):
            worker.count_sync(stats)

    def _end_round(self, tasks: Tasks) -> dict[int, WorkerRound]:
        """Average buffers, and learn what every worker of the run did."""
        self.pass_limit = agreed_pass_limit(self.workers, self.pass_limit, self.placement)
        for trainer, replicas, weights, comm in self._synced(self._batches(tasks)):
            trainer.outer.average_buffers(replicas, weights, comm)
        longest = max(worker.busy_seconds for worker in self.workers.values())
        turns = max(1.0, self._training_seconds / max(longest, 1e-9))
        rows = self.placement.gather(
            {
                worker.id: WorkerRound.of(worker, turns).to_numbers()
                for worker in self.workers.values()
            }
        )
        done = {worker: WorkerRound.from_numbers(row) for worker, row in rows.items()}
        self._last_samples = {worker: row.samples for worker, row in done.items()}
        self.rounds_done += 1
        self.inner_steps += self.round_steps
        self.samples += int(sum(self._last_samples.values()))
        sizes = [len(trainer.worker_ids) for trainer in self.trainers.values()]
        self.syncs += any(size > 1 for size in sizes)
        self._diverged = any(self._syncing.diverges(size) for size in sizes)
        self.speeds = self._batching.shares.update(
            self.speeds, {worker: row.samples / row.turn_seconds for worker, row in done.items()}
        )
        self.round_steps = 0
        return done

    def _request_batches(
        self, tasks: Tasks, done: Mapping[int, WorkerRound]
    ) -> list[TrainerReport]:
        """Pool each trainer's gradient statistics and let the batch rule set its next request."""
        reports = []
        for trainer in self.trainers.values():
            mine = [done[worker] for worker in trainer.worker_ids]
            requested = trainer.requested_batch
            trainer.update_batch(
                [row.moments for row in mine], int(sum(row.samples for row in mine))
            )
            reports.append(
                report_trainer(
                    trainer,
                    requested,
                    [tasks[worker] for worker in trainer.worker_ids],
                    mine,
                    self._first_rate,
                )
            )
        return reports

    def _merge_trainers(self, last: bool) -> Merge | None:
        merge = self._merging.policy.decide(
            self.rounds_done,
            {trainer.id: trainer.requested_batch for trainer in self.trainers.values()},
        )
        if merge or last:
            self.average_replicas()
        if merge:
            self.trainers = apply_merge(
                merge, self.trainers, self.workers, self._merging.fates, self.placement
            )
        return merge

    def _report(
        self,
        tasks: Tasks,
        done: Mapping[int, WorkerRound],
        trainers: Sequence[TrainerReport],
        merge: Merge | None,
    ) -> RoundReport:
        return report_round(
            tasks,
            done,
            trainers,
            merge,
            round=self.rounds_done,
            samples=self.samples,
            inner_steps=self.inner_steps,
            syncs=self.syncs,
            pass_limit=self.pass_limit if self.pass_limit != self._limit_before else 0,
            handed=self._bytes_handed(),
            model_bytes=self._model_bytes,
            placement=self.placement,
        )

    def _synced(
        self, samples: Mapping[int, float]
    ) -> Iterator[tuple[Trainer, list[Replica], list[float], Comm]]:
        """Each trainer with local workers: their replicas, their weights, and all its workers'
        comm.

        samples: Of every worker of the run, as weights.

        """
        # On all ranks, and before any is used: process groups may be made.
        comms = {
            trainer.id: self.placement.comm(trainer.worker_ids)
            for trainer in self.trainers.values()
        }
        for trainer in self.trainers.values():
            here = self.placement.local(trainer.worker_ids)
            if here:
                comm = self._meter.around(comms[trainer.id], here)
                yield trainer, self._replicas(trainer), trainer.weights(samples, here), comm

    def _replicas(self, trainer: Trainer) -> list[Replica]:
        return [self.workers[worker].replica for worker in self.placement.local(trainer.worker_ids)]

    def _batches(self, tasks: Tasks) -> dict[int, float]:
        return {worker: task.plan.worker_batch for worker, task in tasks.items()}

    def _bytes_handed(self) -> Bytes:
        """Since the run began."""
        return self.placement.total_bytes() - self._bytes_before

    def _new_trainer(self, trainer: int, worker_ids: range) -> Trainer:
        replica = Replica.of(self._model, with_residuals=False, on_host=False)
        outer = OuterSync(replica, self._syncing, self._fragments)
        controller = BatchController(self._batching.rule, self._batching.guards)
        return Trainer(trainer, outer, controller, worker_ids)
