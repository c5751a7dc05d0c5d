"""A random batch: a control that has the mean of adaptive batches but not their reasons."""

import random
from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class RandomBatch:
    """The batch is drawn after each test, evenly between two sizes. A draw depends on the run's
    seed and on the samples that the trainer has seen.
    """

    key: ClassVar[str] = "random"

    lowest: int
    """Smallest batch, in samples."""
    highest: int
    """Largest batch, in samples; the mean is halfway between both."""

    needs_moments = False
    inner_products = None

    def __post_init__(self) -> None:
        require(
            0 < self.lowest <= self.highest,
            f"lowest must be > 0 and <= highest = {self.highest}, got {self.lowest}",
        )

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        draw = random.Random(f"{point.seed} {point.samples}")
        return draw.randint(self.lowest, self.highest)
