"""Seesaw: the batch grows where the schedule would cut the learning rate (arXiv 2510.14717)."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.batch_rules.batch_rule import UNBOUNDED, TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class Seesaw:
    """Grows the batch by 1/a where the schedule cuts the learning rate by a; the rate falls by
    sqrt(a).

    The batch changes after a round. With `coupling = "sqrt"` the schedule's cut a times the growth
    sqrt(1/a) leaves sqrt(a) where a round begins; within it the rate follows the schedule.
    """

    key: ClassVar[str] = "seesaw"

    fewest_groups = 1
    measurement = ""

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if point.decay <= 0:
            return UNBOUNDED
        return min(UNBOUNDED, round(point.initial_batch / point.decay))
