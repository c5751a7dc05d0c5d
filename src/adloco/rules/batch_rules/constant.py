"""A batch that never changes."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class ConstantBatch:
    """The requested batch stays unchanged."""

    key: ClassVar[str] = "constant"

    needs_moments = False
    inner_products = None
    measurement = ""

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        return point.requested_batch
