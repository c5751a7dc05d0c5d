"""What each worker does in the coming round: micro-batches from its trainer's request, and learning
rates from the schedule.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adloco.algorithms.method import Batching
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import RoundTask, Worker
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import BatchRule, groups_to_compare
from adloco.rules.learning_rate import LearningRate
from adloco.rules.switch import BatchPlan, SwitchMode, smallest_share

Trainers = Mapping[int, Trainer]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The rules that turn requests into tasks."""

    batching: Batching
    learning_rate: LearningRate | None
    tokens_per_sample: int
    ranks: int
    """Ranks that serve a worker."""

    def plans(self, trainer: Trainer, speeds: Mapping[int, float]) -> dict[int, BatchPlan]:
        """Each worker's micro-batches for an inner step. speeds: Samples per second by worker."""
        return trainer.plans(self.batching.shares, speeds, self.batching.switch, self.ranks)

    def samples_per_inner_step(self, trainers: Trainers, speeds: Mapping[int, float]) -> int:
        """Samples that one inner step takes over all trainers."""
        return sum(
            plan.worker_batch
            for trainer in trainers.values()
            for plan in self.plans(trainer, speeds).values()
        )

    def tasks(
        self,
        trainers: Trainers,
        speeds: Mapping[int, float],
        *,
        samples: int,
        steps_before: int,
        inner_steps: int,
        pass_limit: int,
    ) -> dict[int, RoundTask]:
        """The task of every worker of the run.

        Args:
            samples, steps_before: Trained on, and done, before this round.
            inner_steps: Inner steps of the round.
            pass_limit: The largest micro-batch since memory ran out; 0: no limit.
        """
        step_tokens = self.samples_per_inner_step(trainers, speeds) * self.tokens_per_sample
        tasks: dict[int, RoundTask] = {}
        for trainer in trainers.values():
            plans = self.plans(trainer, speeds)
            factor = self._lr_factor(
                samples * self.tokens_per_sample,
                step_tokens,
                sum(plan.worker_batch for plan in plans.values()),
            )
            for worker, plan in plans.items():
                own = plan.at_most(pass_limit) if pass_limit else plan
                tasks[worker] = RoundTask(
                    trainer=trainer.id,
                    plan=own,
                    inner_steps=inner_steps,
                    first_step=steps_before,
                    lr_factor=factor,
                )
        return tasks

    def _lr_factor(
        self, tokens_before: int, step_tokens: int, trainer_batch: int
    ) -> Callable[[int], float] | None:
        schedule = self.learning_rate
        if schedule is None:
            return None
        return lambda step: schedule.factor(tokens_before + (step + 1) * step_tokens, trainer_batch)


def check_groups(rule: BatchRule, switch: SwitchMode, test_groups: int, ranks: int) -> None:
    """Refuse settings with which a worker on so many ranks could not compare enough groups."""
    groups = groups_to_compare(rule)
    # The groups of a test step are a multiple or a divisor of test_groups.
    require(
        groups < 4 or test_groups % 4 == 0,
        "test.groups must be a multiple of 4 for inner-product tests, or their estimator must be "
        f"plug-in; got {test_groups}",
    )
    smallest = smallest_share(groups, ranks)
    needed = math.ceil(smallest / ranks)
    require(
        switch.mode == "always" or switch.b_max >= needed,
        f"switch.max_micro_batch must be >= {needed} for this batch rule, which compares "
        f"{smallest} samples of each worker, or switch.mode always; got {switch.max_micro_batch}",
    )


def agreed_pass_limit(workers: Mapping[int, Worker], current: int, placement: Placement) -> int:
    """The largest micro-batch from here on, for all workers of the run; 0: no limit.

    It is smaller than before where a worker, on any rank, ran out of memory.
    """
    if placement.any(any(worker.pass_limit for worker in workers.values())):
        rows = placement.gather({worker.id: [worker.pass_limit] for worker in workers.values()})
        limits = [current, *(int(limit) for (limit,) in rows.values())]
        current = min(limit for limit in limits if limit > 0)
    for worker in workers.values():
        worker.pass_limit = 0  # From the next round on it is in the plans.
    return current
