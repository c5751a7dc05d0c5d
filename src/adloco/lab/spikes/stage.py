"""Names the spikes of trainers' losses in the reports of rounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adloco.algorithms.reports import RoundReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage, with_numbers
from adloco.algorithms.worker_round import WorkerRound
from adloco.lab.spikes.losses import LossRange
from adloco.lab.spikes.option import Spikes

NO_SPIKE = {"spikes": 0, "spike_step": None, "spike_deviations": None}
"""The numbers of a trainer without a spike."""


class SpikeStage(Stage):
    """Compares the losses of a round with those before."""

    key = Spikes.key

    def __init__(self, spikes: Spikes, parts: RoundParts, state: RunState) -> None:
        self._limit = spikes.spike_deviations
        self._ranges: dict[int, LossRange] = {}
        """Losses of each trainer's inner steps so far, by id."""

    def report(
        self,
        tasks: Mapping[int, RoundTask],
        done: Mapping[int, WorkerRound],
        report: RoundReport,
    ) -> RoundReport:
        rows: dict[int, Mapping[str, Any]] = {row.trainer: NO_SPIKE for row in report.trainers}
        self._ranges = {each: self._ranges.get(each, LossRange()) for each in rows}
        for trainer, losses in self._ranges.items():
            mine = [worker for worker, task in tasks.items() if task.trainer == trainer]
            spike = losses.see(mean_losses([done[worker] for worker in mine]), self._limit)
            if spike:
                rows[trainer] = {
                    "spikes": spike.steps,
                    "spike_step": tasks[mine[0]].first_step + spike.highest + 1,
                    "spike_deviations": spike.deviations,
                }
        return with_numbers(report, of_trainers=rows)

    def numbers(self) -> Any:
        return {str(trainer): own.to_numbers() for trainer, own in self._ranges.items()}

    def load_numbers(self, numbers: Any) -> None:
        self._ranges = {int(trainer): LossRange(*own) for trainer, own in numbers.items()}


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
