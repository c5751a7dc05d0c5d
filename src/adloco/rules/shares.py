"""How a trainer's batch is split over its workers: evenly, or by measured speed, so that nobody
waits long at a sync.

Unequal shares change no estimate: pseudo-gradients are averaged by samples, and the moments of the
norm test carry each worker's samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from adloco.errors import require
from adloco.rules.switch import balanced


class Shares(Protocol):
    """Splits a trainer's request. Pure: the same numbers give the same shares on every rank."""

    def split(
        self,
        requested: int,
        workers: Sequence[int],
        speeds: Mapping[int, float],
        minimum: int,
        maximum: int | None,
    ) -> list[int]:
        """Samples of each worker, in their order; together the request, or all minimums if more.

        Args:
            requested: samples to split; at most `maximum` for each worker.
            workers: who shares them.
            speeds: samples per second by worker, of those measured so far.
            minimum: fewest samples of a worker.
            maximum: most samples of a worker, at least the minimum; None: no limit.
        """
        ...

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        """The speeds after another round."""
        ...


@dataclass(frozen=True, kw_only=True)
class EqualShares:
    """As even as whole numbers allow."""

    key: ClassVar[str] = "equal"

    def split(
        self,
        requested: int,
        workers: Sequence[int],
        speeds: Mapping[int, float],
        minimum: int,
        maximum: int | None,
    ) -> list[int]:
        # Even shares of a request that fits are within the maximum.
        return list(balanced(max(requested, len(workers) * minimum), len(workers)))

    def update(
        self, speeds: Mapping[int, float], measured: Mapping[int, float]
    ) -> dict[int, float]:
        return {}


@dataclass(frozen=True, kw_only=True)
class SpeedShares:
    """In proportion to each worker's samples per second."""

    key: ClassVar[str] = "speed"

    smoothing: float = 0.5
    """Weight of the past in the moving average of each worker's speed; 0 uses the last round alone.
    """
    limit: float = 4.0
    """A speed counts as at most this many times, and at least this part of, the median of the
    trainer's workers.
    """

    def __post_init__(self) -> None:
        require(0 <= self.smoothing < 1, f"smoothing must be in [0, 1), got {self.smoothing}")
        require(self.limit >= 1, f"limit must be >= 1, got {self.limit}")

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
    """`total` in whole numbers in proportion to the weights, each within minimum and maximum.

    By largest remainders; ties go to the first. Those that would get more than the maximum get the
    maximum, and the others share the rest in proportion. maximum None: no limit.
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
    # What each would get without the minimum, less the minimum: a small share must not be topped up
    # twice.
    excess = [max(0.0, total * weight / sum(weights) - minimum) for weight in weights]
    exact = [free * part / sum(excess) if sum(excess) else free / len(weights) for part in excess]
    shares = [minimum + math.floor(part) for part in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda index: (math.floor(exact[index]) - exact[index], index)
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
