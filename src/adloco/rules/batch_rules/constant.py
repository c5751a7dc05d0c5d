"""A batch that never changes."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class ConstantBatch:
    """The requested batch stays unchanged."""

    key: ClassVar[str] = "constant"

    fewest_groups = 1
    measurement = ""

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        return point.requested_batch
