"""Splits a trainer's batch over its workers: evenly, or by measured speed, so that no worker waits
long at a sync.

Unequal shares bias no estimate: pseudo-gradients are averaged with the samples as weights (unless
`outer.weights` is equal), and the moments of the norm test include each worker's number of samples.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

PAST = 0.5
"""Weight of the past in the moving average of each worker's speed."""
LIMIT = 4.0
"""Bound on the ratio of a worker's speed to the median of the trainer's workers, either way."""


@runtime_checkable
class Shares(Protocol):
    """Decides how a trainer's batch is split over its workers.

    The methods are pure: the same numbers give the same shares on every rank.
    """

    def weights(self, workers: Sequence[int], speeds: Mapping[int, float]) -> list[float]:
        """A positive number for each worker, to which its samples are in proportion.

        speeds: Samples per second by worker id, for the workers measured so far.
        """

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        """The speeds to use in the next round.

        Args:
            speeds: Samples per second by worker id, from this method's last result.
            measured: Samples per second by worker id in the round that has ended.
        """


@dataclass(frozen=True, kw_only=True)
class EqualShares:
    """Shares that differ by at most one sample."""

    key: ClassVar[str] = "equal"

    def weights(self, workers: Sequence[int], speeds: Mapping[int, float]) -> list[float]:
        return [1.0] * len(workers)

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class SpeedShares:
    """Shares in proportion to each worker's measured samples per second."""

    key: ClassVar[str] = "speed"

    def weights(self, workers: Sequence[int], speeds: Mapping[int, float]) -> list[float]:
        known = [speeds[worker] for worker in workers if worker in speeds]
        median = statistics.median(known) if known else 1.0
        return [
            min(max(speeds.get(worker, median), median / LIMIT), median * LIMIT)
            for worker in workers
        ]

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        return {
            worker: PAST * speeds.get(worker, speed) + (1 - PAST) * speed
            for worker, speed in measured.items()
        }


def proportional(
    total: int, weights: Sequence[float], *, minimum: int, maximum: int | None
) -> list[int]:
    """Split `total` into whole numbers in proportion to positive weights, each within bounds.

    Fractions are rounded by largest remainders; ties go to the first. A share above the maximum is
    set to the maximum, and the others share the rest in proportion.

    Args:
        total: Number to split, at most the maximum for each; if it is less than the minimum for
            each, every share is the minimum.
        maximum: Largest share; None: no limit.
    """
    total = max(total, minimum * len(weights))
    shares = _proportional(total, weights, minimum)
    if maximum is None or max(shares) <= max(minimum, maximum):
        return shares
    assert total <= maximum * len(weights), "the total must allow the maximum for each"
    below = [index for index, share in enumerate(shares) if share <= maximum]
    rest = total - maximum * (len(shares) - len(below))
    others = proportional(
        rest, [weights[index] for index in below], minimum=minimum, maximum=maximum
    )
    shares = [maximum] * len(shares)
    for index, share in zip(below, others, strict=True):
        shares[index] = share
    return shares


def _proportional(total: int, weights: Sequence[float], minimum: int) -> list[int]:
    free = total - minimum * len(weights)
    # Each gets the minimum, and a part of what is free. That part is in proportion to how far its
    # share without a minimum exceeds the minimum, so a share below the minimum ends at it.
    excess = [max(0.0, total * weight / sum(weights) - minimum) for weight in weights]
    exact = [free * part / sum(excess) if sum(excess) else free / len(weights) for part in excess]
    shares = [minimum + math.floor(part) for part in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda index: (math.floor(exact[index]) - exact[index], index)
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
