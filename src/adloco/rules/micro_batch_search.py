"""The largest micro-batch that fits: doubling, then bisection, over measured steps.

Memory grows linearly with the micro-batch, so that two measured sizes predict the next. A size that
is predicted to exceed what there is altogether is not run: an out-of-memory error on one rank of an
island would leave the others waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step with micro-batches of this size, on the rank that needed most."""

    micro_batch: int
    peak_bytes: int
    """The most that a worker held."""
    seconds: float
    """0 where memory ran out."""
    fits: bool


def largest_micro_batch(
    measure: Callable[[int], Measured], *, limit_bytes: int, largest: int
) -> tuple[int, list[Measured]]:
    """(size, all measured sizes in rising order); ValueError if not even one sample fits. measure:
    runs a step.

    limit_bytes: what a worker may take before it runs out for certain; largest: size beyond which
    nobody asks.
    """
    seen: dict[int, Measured] = {}

    def fits(size: int) -> bool:
        if _predicted(list(seen.values()), size) > limit_bytes:
            return False
        seen[size] = measure(size)
        return seen[size].fits

    require(
        fits(1),
        "not even a micro-batch of 1 fits: use a smaller model or context, gradient checkpointing, "
        "shards, or fewer workers",
    )
    low, high = 1, 2
    while high <= largest and fits(high):
        low, high = high, 2 * high
    high = min(high, largest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, [seen[size] for size in sorted(seen)]


def _predicted(seen: list[Measured], size: int) -> float:
    """Peak of a size on the line through the two largest that were measured; 0 if fewer were."""
    ran = sorted((row for row in seen if row.seconds > 0), key=lambda row: row.micro_batch)
    if len(ran) < 2:
        return 0.0
    first, second = ran[-2:]
    slope = (second.peak_bytes - first.peak_bytes) / (second.micro_batch - first.micro_batch)
    return second.peak_bytes + slope * (size - second.micro_batch)
