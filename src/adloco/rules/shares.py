"""How a trainer's batch is split over its workers: evenly, or by measured speed, so that no worker
waits long at a sync.

Unequal shares bias no estimate: pseudo-gradients are averaged with the samples as weights, and the
moments of the norm test include each worker's number of samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from adloco.errors import require_range
from adloco.rules.switch import balanced


class Shares(Protocol):
    """Splits a trainer's batch over its workers.

    The methods are pure: the same numbers give the same shares on every rank.
    """

    def split(
        self,
        requested: int,
        workers: Sequence[int],
        speeds: Mapping[int, float],
        minimum: int,
        maximum: int | None,
    ) -> list[int]:
        """Split a batch over workers.

        Args:
            requested: Samples to split; at most `maximum` times the number of workers.
            workers: Ids of the trainer's workers.
            speeds: Samples per second by worker id, for the workers measured so far.
            minimum: Fewest samples of a worker.
            maximum: Most samples of a worker, at least the minimum; None: no limit.

        Returns:
            Samples of each worker, in the order of `workers`. Their sum is `requested`, or the
            minimum for every worker if that is more.
        """
        ...

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        """The speeds to use in the next round.

        Args:
            speeds: Samples per second by worker id, from this method's last result.
            measured: Samples per second by worker id in the round that has ended.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EqualShares:
    """Shares that differ by at most one sample."""

    key: ClassVar[str] = "equal"

    def split(
        self,
        requested: int,
        workers: Sequence[int],
        speeds: Mapping[int, float],
        minimum: int,
        maximum: int | None,
    ) -> list[int]:
        # The request is at most the maximum times the workers, so no even share exceeds it.
        return list(balanced(max(requested, len(workers) * minimum), len(workers)))

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class SpeedShares:
    """Shares in proportion to each worker's measured samples per second."""

    key: ClassVar[str] = "speed"

    smoothing: float = 0.5
    """Weight of the past in the moving average of each worker's speed; 0 uses the last round alone.
    """
    limit: float = 4.0
    """Bound on the ratio of a worker's speed to the median of the trainer's workers: a limit of 4
    keeps speeds between a quarter of the median and four times the median.
    """

    def __post_init__(self) -> None:
        require_range(self, "smoothing", at_least=0, below=1)
        require_range(self, "limit", at_least=1)

    def split(
        self,
        requested: int,
        workers: Sequence[int],
        speeds: Mapping[int, float],
        minimum: int,
        maximum: int | None,
    ) -> list[int]:
        known = sorted(speeds[worker] for worker in workers if worker in speeds)
        median = known[len(known) // 2] if known else 1.0
        bounded = [
            min(max(speeds.get(worker, median), median / self.limit), median * self.limit)
            for worker in workers
        ]
        total = max(requested, len(workers) * minimum)
        return proportional(total, bounded, minimum=minimum, maximum=maximum)

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        return {
            worker: self.smoothing * speeds.get(worker, speed) + (1 - self.smoothing) * speed
            for worker, speed in measured.items()
        }


def proportional(
    total: int, weights: Sequence[float], *, minimum: int, maximum: int | None
) -> list[int]:
    """Split `total` into whole numbers in proportion to the weights, each within bounds.

    Fractions are rounded by largest remainders; ties go to the first. A share above the maximum is
    set to the maximum, and the others share the rest in proportion.

    Args:
        total: Number to split; at least the minimum, and at most the maximum, for each weight.
        weights: One positive number for each share.
        minimum: Smallest share.
        maximum: Largest share; None: no limit.
    """
    shares = _proportional(total, weights, minimum)
    if maximum is None or max(shares) <= maximum:
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
    assert free >= 0, "the total must allow the minimum for each"
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
