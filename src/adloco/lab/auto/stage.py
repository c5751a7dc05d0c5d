"""Chooses settings after a round, from what the round measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from adloco.algorithms.reports import RoundReport, TrainerReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage
from adloco.algorithms.state_parts import RUN
from adloco.algorithms.worker_round import WorkerRound
from adloco.lab.auto.controller import AutoController, MeasuredRound, changed
from adloco.lab.auto.option import Auto
from adloco.rules.batch_rules.norm_test import NormTest


class AutoStage(Stage):
    """Sets the run's numbers in force for the rounds to come."""

    key = Auto.key

    def __init__(self, auto: Auto, parts: RoundParts, state: RunState) -> None:
        rule = parts.batching.rule
        self._state, self._parts = state, parts
        self._controller = AutoController(
            auto,
            norm_test=rule if isinstance(rule, NormTest) else None,
            fewest_steps=parts.syncing.streaming.fewest_steps,
        )
        state.chosen = self._controller.within_bounds(state.chosen)

    def report(
        self,
        tasks: Mapping[int, RoundTask],
        done: Mapping[int, WorkerRound],
        report: RoundReport,
    ) -> RoundReport:
        if report.merges:  # Other workers serve the trainers from now on.
            self._controller.forget()
            return report
        fits = self._parts.placement.ranks_per_worker * self._parts.batching.switch.b_max
        measured = measured_round(tasks, done, report.trainers, fits)
        changes = self._controller.update(self._state.chosen, measured, report.round)
        self._state.chosen = changed(self._state.chosen, changes)
        return replace(report, changes=(*report.changes, *changes))

    def state_parts(self) -> Mapping[str, Any]:
        return {RUN: self._controller.state_dict()}

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        self._controller.load_state_dict(parts[RUN])


def measured_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    fits: int,
) -> MeasuredRound:
    """The times of a round, from which other rounds are predicted.

    Args:
        tasks: The tasks of every worker of the run, by id.
        done: Their numbers of the round, by id.
        trainers: Reports of all trainers.
        fits: Samples that fit in one pass of a worker's ranks.
    """
    steps = max(task.inner_steps for task in tasks.values())
    several = {trainer.trainer for trainer in trainers if trainer.workers > 1}
    syncs = [
        row.sync.exposed_seconds for worker, row in done.items() if tasks[worker].trainer in several
    ]
    return MeasuredRound(
        trainer_batch=fmean(trainer.trainer_batch for trainer in trainers),
        fits=fits * fmean(trainer.workers for trainer in trainers),
        noise_scale=_noise_scale(trainers),
        step_seconds=max(row.turn_seconds for row in done.values()) / steps,
        sync_seconds=min(syncs, default=None),
    )


def _noise_scale(trainers: Sequence[TrainerReport]) -> float | None:
    """The mean S over the mean |G|^2 of the trainers; None if it is not measured or not finite."""
    variance = fmean(trainer.grad_variance or 0.0 for trainer in trainers)
    norm_sq = fmean(trainer.grad_norm_sq or 0.0 for trainer in trainers)
    return variance / norm_sq if variance > 0 and norm_sq > 0 else None
