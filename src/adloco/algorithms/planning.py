"""The task of each worker in the coming round: micro-batches and learning rates.

Micro-batches follow from the requested batch of the worker's trainer, learning rates from the
schedule.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from adloco.algorithms.method import Batching, Method
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.learning_rate import LearningRate
from adloco.rules.shares import proportional
from adloco.rules.switch import BatchPlan, SwitchMode, smallest_share

SMALLEST, MOST_STEPS = 1e-300, 2**53
"""The smallest number to divide by, and the longest round in inner steps."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Turns the requested batches of trainers into tasks of workers."""

    batching: Batching
    learning_rate: LearningRate | None
    """The schedule; None: the inner optimizers' own rates, unchanged."""
    tokens_per_sample: int
    ranks: int
    """Ranks that serve each worker."""
    method: Method

    def samples_per_inner_step(self, state: RunState) -> int:
        """Samples that one inner step takes over all trainers."""
        return samples_of(self._plans(state))

    def fewest_samples(self, state: RunState) -> int:
        """Fewest samples of an inner step over all trainers: those that the batch rule compares."""
        return self._smallest_share * sum(
            len(trainer.worker_ids) for trainer in state.trainers.values()
        )

    def tasks(self, state: RunState) -> dict[int, RoundTask]:
        """The task of every worker of the run in the round that has begun, by worker id."""
        plans = self._plans(state)
        # No more than the budget leaves for it (`Budget.next_round`): since the round began,
        # trainers may have been dropped, whose samples the others do not take.
        most = samples_of(plans) + self.fewest_samples(state) - 1
        last = min(state.final_samples, most)
        final = self._final_plans(plans, last) if last else plans
        steps = [plans] * (state.round_steps - 1) + [final]
        # Steps that were taken before a worker was dropped had smaller batches than these plans.
        begun = {worker: state.last_batches.get(worker, ()) for worker in plans}
        batches = {
            worker: [*taken, *(step[worker].worker_batch for step in steps[len(taken) :])]
            for worker, taken in begun.items()
        }
        each = map(sum, zip(*batches.values(), strict=True))
        samples_after = [*accumulate(each, initial=state.samples)][1:]
        return {
            worker: RoundTask(
                trainer=trainer.id,
                plan=plans[worker],
                final_plan=final[worker],
                batches=batches[worker],
                inner_steps=state.round_steps,
                first_step=state.inner_steps,
                lr_factor=self._lr_factor(samples_after, steps, tuple(trainer.worker_ids)),
                start=trainer.outer.parameters(),
            )
            for trainer in state.trainers.values()
            for worker in trainer.worker_ids
        }

    def steps_of_round(self, samples: int) -> int:
        """H of a round that begins after so many samples of the run."""
        shrunk = max(math.pow(self.decay(samples), self.method.sync_growth), SMALLEST)
        return round(min(self.method.sync_every / shrunk, MOST_STEPS))

    def decay(self, samples: int) -> float:
        """Fraction of the peak rate that the schedule's decay leaves after so many samples."""
        schedule = self.learning_rate
        return 1.0 if schedule is None else schedule.decay(samples * self.tokens_per_sample)

    @property
    def _smallest_share(self) -> int:
        return smallest_share(self.batching.rule.fewest_groups, self.ranks)

    def _plans(self, state: RunState) -> dict[int, BatchPlan]:
        """Each worker's micro-batches for an inner step, by worker id."""
        switch = self.batching.switch.at_most(state.pass_limit)
        plans: dict[int, BatchPlan] = {}
        for trainer in state.trainers.values():
            size = trainer.requested_batch, len(trainer.worker_ids), self.ranks
            weights = self.batching.shares.weights(trainer.worker_ids, state.speeds)
            require(
                len(weights) == size[1] and all(0 < weight < math.inf for weight in weights),
                f"placement.balance must give a positive number for each of {size[1]} workers, got "
                f"{weights}",
            )
            # Whole numbers as near to the weights as these bounds allow.
            shares = proportional(
                switch.clipped(*size),
                weights,
                minimum=self._smallest_share,
                maximum=switch.most_per_worker(*size),
            )
            for worker, share in zip(trainer.worker_ids, shares, strict=True):
                plans[worker] = switch.plan(share, self.ranks)
        return plans

    def _final_plans(self, plans: Mapping[int, BatchPlan], samples: int) -> dict[int, BatchPlan]:
        """Plans of a step of so many samples over all workers, in proportion to these plans."""
        batches = [plan.worker_batch for plan in plans.values()]
        shares = proportional(samples, batches, minimum=self._smallest_share, maximum=None)
        return {
            worker: plan.with_samples(share)
            for (worker, plan), share in zip(plans.items(), shares, strict=True)
        }

    def _lr_factor(
        self,
        samples_after: Sequence[int],
        steps: Sequence[Mapping[int, BatchPlan]],
        workers: Collection[int],
    ) -> Callable[[int], float] | None:
        """The factor on a trainer's rates by inner step.

        Args:
            samples_after: Samples of the run after each inner step of the round.
            steps: The plans of all workers of the run, for each inner step of the round.
        """
        schedule = self.learning_rate
        if schedule is None:
            return None

        def factor(step: int) -> float:
            batch = sum(steps[step][worker].worker_batch for worker in workers)
            return schedule.factor(samples_after[step] * self.tokens_per_sample, batch)

        return factor


def samples_of(plans: Mapping[int, BatchPlan]) -> int:
    """Samples of an inner step over all workers with these plans."""
    return sum(plan.worker_batch for plan in plans.values())


def check_groups(rule: BatchRule, switch: SwitchMode, test_groups: int, ranks: int) -> None:
    """Raise ValueError if a worker on this many ranks could not compare enough groups."""
    require(
        test_groups >= rule.fewest_groups,
        f"test.groups must be >= {rule.fewest_groups} for this batch rule, got {test_groups}",
    )
    smallest = smallest_share(rule.fewest_groups, ranks)
    needed = math.ceil(smallest / ranks)
    require(
        switch.mode == "always" or switch.b_max >= needed,
        f"switch.max_micro_batch must be >= {needed} for this batch rule, which compares "
        f"{smallest} samples of each worker, or switch.mode always; got {switch.max_micro_batch}",
    )
