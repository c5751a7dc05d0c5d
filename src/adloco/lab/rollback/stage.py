"""Undoes a round of a trainer whose loss had a spike: a copy of what the round began with, and the
way back to it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from adloco.algorithms.reports import RoundReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage, with_numbers
from adloco.algorithms.state_parts import RUN, trainer_part, worker_part
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker_round import WorkerRound
from adloco.distributed.dtensor import copied
from adloco.lab.rollback.losses import LossRange
from adloco.lab.rollback.option import Spikes
from adloco.rules.moments import Moments

NO_SPIKE = {"spikes": 0, "spike_step": None, "spike_deviations": None, "rolled_back": 0}
"""The numbers of a trainer without a spike."""


class RollbackStage(Stage):
    """Names the spikes of trainers' losses, and undoes the rounds that have one if told to."""

    key = Spikes.key

    def __init__(self, spikes: Spikes, parts: RoundParts, state: RunState) -> None:
        self._spikes, self._state, self._placement = spikes, state, parts.placement
        self._ranges: dict[int, LossRange] = {}
        """Losses of each trainer's inner steps so far, by id."""
        self._found: dict[int, dict[str, Any]] = {}
        """The numbers of the trainers that had a spike in the round, by id."""
        self._before: dict[str, Any] = {}
        """Copies of what the round began with in this process, by part of a checkpoint; empty if
        the round cannot be rolled back.
        """

    def begin_round(self) -> None:
        state, placement = self._state, self._placement
        if self._spikes.on_spike != "rollback":
            return
        self._before = {
            trainer_part(trainer.id): _copied(trainer.outer.state_dict())
            for trainer in state.trainers.values()
            if placement.local(trainer.worker_ids)
        } | {
            # The parameters are the global ones, unless workers have diverged.
            worker_part(worker.id): _copied(worker.tensors(with_params=state.diverged))
            for worker in state.workers.values()
        }

    def after_round(
        self, tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
    ) -> Mapping[int, WorkerRound]:
        """The numbers without the statistics of rounds that were undone."""
        found = dict(done)
        self._found = {}
        self._ranges = {
            trainer: self._ranges.get(trainer, LossRange()) for trainer in self._state.trainers
        }
        for trainer in self._state.trainers.values():
            mine = trainer.worker_ids
            losses = mean_losses([done[own] for own in mine])
            spike = self._ranges[trainer.id].see(losses, self._spikes.spike_deviations)
            if spike:
                self._found[trainer.id] = {
                    "spikes": spike.steps,
                    "spike_step": tasks[mine[0]].first_step + spike.highest + 1,
                    "spike_deviations": spike.deviations,
                    "rolled_back": int(bool(self._before)),
                }
                if self._before:
                    self._restore(trainer)
                    found |= {own: replace(done[own], moments=Moments()) for own in mine}
        self._before = {}
        return found

    def _restore(self, trainer: Trainer) -> None:
        """Set a trainer and its workers here to what the round began with.

        Streams stay where they are, so that the round's data is not read again.
        """
        workers = self._state.workers
        here = self._placement.local(trainer.worker_ids)
        if not here:
            return
        trainer.outer.load_state_dict(self._before[trainer_part(trainer.id)])
        trainer.outer.copy_all_to_workers([workers[worker].replica for worker in here])
        for worker in here:
            workers[worker].load_tensors(self._before[worker_part(worker)])

    def report(
        self,
        tasks: Mapping[int, RoundTask],
        done: Mapping[int, WorkerRound],
        report: RoundReport,
    ) -> RoundReport:
        rows = {row.trainer: NO_SPIKE | self._found.get(row.trainer, {}) for row in report.trainers}
        return with_numbers(report, of_trainers=rows)

    def state_parts(self) -> Mapping[str, Any]:
        ranges = {str(trainer): own.to_numbers() for trainer, own in self._ranges.items()}
        return {RUN: ranges, **self._before}

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        before = dict(parts)
        ranges = before.pop(RUN)
        self._ranges = {int(trainer): LossRange(*own) for trainer, own in ranges.items()}
        # The option may have been another one when the state was saved.
        self._before = before if self._spikes.on_spike == "rollback" else {}


def mean_losses(rows: Sequence[WorkerRound]) -> list[float]:
    """A trainer's loss at each inner step of a round: the mean over its workers' samples.

    Losses that are not finite are left out; nan where no worker has one.

    rows: The numbers of its workers in the round.
    """
    means = []
    for step in zip(*(zip(row.losses, row.batches, strict=True) for row in rows), strict=True):
        known = [(loss, samples) for loss, samples in step if math.isfinite(loss)]
        total = sum(samples for _, samples in known)
        means.append(sum(loss * samples for loss, samples in known) / total if total else math.nan)
    return means


def _copied(value: Any) -> Any:
    """A nesting of dictionaries, lists and tuples with copies of its tensors, sharded as they are.

    Tensors of the global parameters that are in host memory are copied there.
    """
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_copied(item) for item in value)  # type: ignore[call-arg]
    return value
