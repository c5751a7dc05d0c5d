"""A batch that goes through a list of sizes again and again: a control for adaptive batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class CyclicBatch:
    """The batch goes through a list of sizes, each for the same number of samples."""

    key: ClassVar[str] = "cyclic"

    cycle: Sequence[int]
    """Requested batches of one cycle, in samples."""
    each_samples: int
    """Samples of the trainer for which each of them is requested."""

    needs_moments = False
    inner_products = None

    def __post_init__(self) -> None:
        require(
            bool(self.cycle) and min(self.cycle) > 0,
            f"cycle must hold batches > 0, and at least one, got {list(self.cycle)}",
        )
        require(self.each_samples > 0, f"each_samples must be > 0, got {self.each_samples}")

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        return self.cycle[point.samples // self.each_samples % len(self.cycle)]
