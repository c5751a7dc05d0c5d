"""Losses that are far above what a trainer's losses have been, from its inner steps alone.

The running mean and variance of the losses are exponentially weighted (West, Communications of the
ACM 22 (1979), 532-535), and equally for the first steps. A loss beyond the limit counts into them
as if it were at the limit: one spike does not hide the next, and a level that stays is soon no
spike any more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 100
"""Inner steps after which a loss has lost 63% of its weight in the mean."""
FEWEST = 50
"""Steps without a judgement at the start, where losses fall fast."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The steps of a round whose losses are spikes."""

    steps: int
    """Number of these steps."""
    highest: int
    """The step with the highest, counted from 0 in the round."""
    deviations: float
    """Standard deviations of its loss above the running mean."""


class LossRange:
    """Running mean and deviation of the losses of a trainer's inner steps."""

    def __init__(self, mean: float = 0.0, variance: float = 0.0, count: int = 0) -> None:
        self._mean, self._variance, self._count = mean, variance, count

    def see(self, losses: Sequence[float], limit: float) -> Spike | None:
        """Add the losses of a round's steps, and name those that are spikes; None without one.

        Args:
            losses: The trainer's mean loss at each step. Those that are not finite are left out.
            limit: Deviations above the mean from which on a loss is a spike.
        """
        found: dict[int, float] = {}
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                continue
            deviation = math.sqrt(self._variance)
            if self._count >= FEWEST and loss > self._mean + limit * deviation > self._mean:
                found[step] = (loss - self._mean) / deviation
                loss = self._mean + limit * deviation
            self._add(loss)
        if not found:
            return None
        highest = max(found, key=found.__getitem__)
        return Spike(steps=len(found), highest=highest, deviations=found[highest])

    def _add(self, loss: float) -> None:
        self._count += 1
        weight = max(1 / self._count, 1 / WINDOW)
        difference = loss - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)

    def to_numbers(self) -> tuple[float, float, int]:
        """Mean, variance and number of losses, from which it can be made again."""
        return self._mean, self._variance, self._count
