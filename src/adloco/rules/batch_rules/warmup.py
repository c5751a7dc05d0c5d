"""A batch that changes in stages that the recipe lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require_setting
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class BatchWarmup:
    """Stage-wise warm-up: a list of batches, each from a given number of samples on."""

    key: ClassVar[str] = "warmup"

    batches: Sequence[int]
    """Requested batch of each stage, in samples; before the first stage it stays unchanged."""
    after_samples: Sequence[int]
    """Samples that the trainer has seen when each stage begins; increasing."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        require_setting(
            len(self.batches) == len(self.after_samples) > 0,
            self,
            "batches",
            "must have as many numbers as {after_samples=}, and at least one",
        )
        require_setting(min(self.batches) > 0, self, "batches", "must be > 0")
        require_setting(
            [*self.after_samples] == sorted({*self.after_samples}) and self.after_samples[0] >= 0,
            self,
            "after_samples",
            "must be >= 0 and increase",
        )

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        begun = [
            batch
            for batch, start in zip(self.batches, self.after_samples, strict=True)
            if point.samples >= start
        ]
        return begun[-1] if begun else point.requested_batch
