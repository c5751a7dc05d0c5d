"""Chooses H after a round, from what the round measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adloco.algorithms.reports import RoundReport, TrainerReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage
from adloco.algorithms.state_parts import RUN
from adloco.algorithms.worker_round import WorkerRound
from adloco.lab.auto.controller import AutoController, MeasuredRound
from adloco.lab.auto.option import Auto


class AutoStage(Stage):
    """Sets the run's H in force for the rounds to come."""

    key = Auto.key

    def __init__(self, auto: Auto, parts: RoundParts, state: RunState) -> None:
        self._state = state
        fewest_steps = parts.syncing.streaming.fewest_steps
        self._controller = AutoController(auto, fewest_steps=fewest_steps)
        first = self._controller.within_bounds(state.chosen.sync_every)
        state.chosen = replace(state.chosen, sync_every=first)

    def report(
        self,
        tasks: Mapping[int, RoundTask],
        done: Mapping[int, WorkerRound],
        report: RoundReport,
    ) -> RoundReport:
        if report.merges:  # Other workers serve the trainers from now on.
            self._controller.forget()
            return report
        chosen = self._state.chosen
        measured = measured_round(tasks, done, report.trainers)
        change = self._controller.update(chosen.sync_every, measured, report.round)
        if change is None:
            return report
        self._state.chosen = replace(chosen, sync_every=int(change.after))
        return replace(report, changes=(*report.changes, change))

    def state_parts(self) -> Mapping[str, Any]:
        return {RUN: self._controller.state_dict()}

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        self._controller.load_state_dict(parts[RUN])


def measured_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
) -> MeasuredRound:
    """The times of a round, from which other rounds are predicted.

    Args:
        tasks: The tasks of every worker of the run, by id.
        done: Their numbers of the round, by id.
        trainers: Reports of all trainers.
    """
    steps = max(task.inner_steps for task in tasks.values())
    several = {trainer.trainer for trainer in trainers if trainer.workers > 1}
    syncs = [
        row.sync.exposed_seconds for worker, row in done.items() if tasks[worker].trainer in several
    ]
    return MeasuredRound(
        step_seconds=max(row.turn_seconds for row in done.values()) / steps,
        sync_seconds=min(syncs, default=None),
    )
