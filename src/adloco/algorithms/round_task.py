"""A worker's task in a round: how many inner steps it takes, and what belongs to each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from adloco.algorithms.method import GradientTest
from adloco.rules.switch import BatchPlan


@dataclass(frozen=True, kw_only=True)
class RoundTask:
    """The work of one worker in one round."""

    trainer: int
    plan: BatchPlan
    inner_steps: int
    first_step: int
    """Number of inner steps that the run took before this round."""
    lr_factor: Callable[[int], float] | None
    """From the inner step of the round, counted from 0, to a factor on the learning rates of the
    optimizers; None: no schedule.
    """
    start: Sequence[Tensor]
    """Parameters and buffers of the last sync, from which a worker starts again after numbers that
    are not finite."""
    final_plan: BatchPlan
    """The micro-batches of the round's last inner step, which differ where the budget ends."""
    batches: Sequence[int] = ()
    """Samples of each inner step of the round, those included that were taken before this was
    planned, by plans that may have been others."""

    def plan_of(self, inner_step: int) -> BatchPlan:
        """The micro-batches of an inner step of the round, counted from 0."""
        return self.final_plan if inner_step == self.inner_steps - 1 else self.plan

    def tests(self, test: GradientTest, inner_step: int) -> bool:
        """True if gradient statistics are taken on an inner step of the round, counted from 0."""
        if test.step == "first":
            return inner_step < test.steps
        return inner_step >= self.inner_steps - test.steps

    def place(self, worker: int, inner_steps: int) -> str:
        """Position of a worker after so many inner steps of the round, for messages."""
        of_run = self.first_step + inner_steps
        return f"trainer {self.trainer}, worker {worker}, inner step {of_run}"
