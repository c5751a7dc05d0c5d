"""Search for the largest micro-batch that fits in memory: doubling, then bisection, by real steps.

Memory grows linearly with the micro-batch, so two measured sizes predict the next. A size whose
prediction exceeds the limit is not run, because an out-of-memory error on one rank of an island
would leave its other ranks waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory and time of a step with one micro-batch size, on the rank that needed most memory."""

    micro_batch: int
    """Samples in each micro-batch."""
    peak_bytes: int
    """Peak memory of a worker."""
    seconds: float
    """Seconds of the step; 0 if memory ran out."""
    fits: bool


def largest_micro_batch(
    measure: Callable[[int], Measured], *, limit_bytes: int, largest: int
) -> tuple[int, list[Measured]]:
    """Find the largest micro-batch that fits.

    limit_bytes: Memory of a worker; a size that is predicted to need more is not run.

    Returns:
        (largest micro-batch that fits, all measurements by rising size).

    Raises:
        ValueError: Not even a micro-batch of one sample fits.
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
    """Predict a size's peak bytes by the line through the two largest sizes that did not run out.

    Returns 0 if there are fewer than two.
    """
    ran = sorted((row for row in seen if row.seconds > 0), key=lambda row: row.micro_batch)
    if len(ran) < 2:
        return 0.0
    first, second = ran[-2:]
    slope = (second.peak_bytes - first.peak_bytes) / (second.micro_batch - first.micro_batch)
    return second.peak_bytes + slope * (size - second.micro_batch)
