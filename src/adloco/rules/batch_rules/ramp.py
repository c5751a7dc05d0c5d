"""A batch that grows from one size to another: a control for adaptive batches."""

import math
from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require_range
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class RampBatch:
    """The batch rises (or falls) from `first` to `last`, by equal factors for equal numbers of
    samples.
    """

    key: ClassVar[str] = "ramp"

    first: int
    """Requested batch at the start, in samples."""
    last: int
    """Requested batch at the end of the ramp and after it, in samples."""
    over_samples: int
    """Samples of the trainer over which the batch changes."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        require_range(self, "first", "last", "over_samples", above=0)

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        part = min(1.0, point.samples / self.over_samples)
        return round(self.first * math.pow(self.last / self.first, part))
