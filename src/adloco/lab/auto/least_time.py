"""Search for the H, batch and n that take the least time to a loss (docs/plan.md), from measured
seconds.

A step of b samples takes t0 + t1 b seconds. A sync stops training for s seconds, once in H steps,
so a sample takes t1 + (t0 + s / H) / b seconds.

H: the samples to a loss grow as H^cost, so the seconds to it as H^cost (t0 + t1 b + s / H). The
derivative is zero at H = s (1 - cost) / (cost (t0 + t1 b)), where syncs take the share `cost` of
the time.

Batch: the samples to a loss are E (1 + b / B), with B the noise scale (McCandlish et al., arXiv
1812.06162), so the seconds to it are proportional to (1 + b / B) (t1 + (t0 + s / H) / b). The
derivative is zero at b = sqrt(B (t0 + s / H) / t1).

n: a request r above F, what fits in one pass, is clipped at F or takes ceil(r / F) passes. A pass
is as long as a full one, t1 F, as on a device that computes all of its samples at once. n is the
smallest r / F above which the request takes less time to a loss than F.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

DISTINCT = 1.2
"""Batches that differ by less than this factor are alike: their seconds differ by chance."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of an inner step: per_step + per_sample x batch."""

    per_step: float
    """t0, what does not grow with the batch."""
    per_sample: float
    """t1."""


def fit_step_seconds(batches: Sequence[float], seconds: Sequence[float]) -> StepSeconds:
    """The non-negative least squares of seconds = per_step + per_sample x batch.

    Of rounds with the same batch the median counts, as often as there are such rounds, because
    seconds have outliers. While all batches are alike (see `DISTINCT`), per_step is 0.

    Args:
        batches: Samples of a step in each round.
        seconds: Seconds of a step in each round.
    """
    points = [
        (
            batch,
            median(took for other, took in zip(batches, seconds, strict=True) if other == batch),
        )
        for batch in batches
    ]
    size, took = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - size) ** 2 for x, _ in points)
    if max(batches) < DISTINCT * min(batches):
        return StepSeconds(per_step=0.0, per_sample=took / size)
    slope = sum((x - size) * (y - took) for x, y in points) / spread
    if slope <= 0:
        return StepSeconds(per_step=took, per_sample=0.0)
    if slope * size <= took:
        return StepSeconds(per_step=took - slope * size, per_sample=slope)
    through_zero = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return StepSeconds(per_step=0.0, per_sample=through_zero)


def fastest_sync_every(*, sync_seconds: float, step_seconds: float, cost: float) -> float:
    """The H with the least time to a loss; 0 if syncs take no time, infinite if only they do.

    Args:
        sync_seconds: s, seconds that training stops for the syncs of a round.
        step_seconds: Seconds of an inner step.
        cost: Exponent, in (0, 1), with which the samples to a loss grow with H.
    """
    if step_seconds == 0:
        return math.inf if sync_seconds > 0 else 0.0
    return sync_seconds * (1 - cost) / (cost * step_seconds)


def fastest_batch(*, noise_scale: float, seconds: StepSeconds, sync_seconds: float) -> float:
    """The batch with the least time to a loss, in samples; infinite if samples take no time.

    Args:
        noise_scale: B, in samples.
        seconds: Seconds of a step.
        sync_seconds: s / H, a step's part of the seconds of a sync.
    """
    if seconds.per_sample == 0:
        return math.inf
    return math.sqrt(noise_scale * (seconds.per_step + sync_seconds) / seconds.per_sample)


def fastest_multiplier(
    *, noise_scale: float, fits: float, seconds: StepSeconds, sync_seconds: float, maximum: float
) -> float:
    """n: the smallest request, as a multiple of what fits, above which to accumulate takes less
    time to a loss than to clip.

    Without seconds other than those of samples it is `maximum`, because a small batch needs fewer
    samples. With an infinite noise scale and few other seconds it is nearly 2, as published.

    Args:
        noise_scale: B, in samples.
        fits: F, samples that fit in one pass of a trainer's workers.
        seconds: Seconds of a step.
        sync_seconds: s / H, a step's part of the seconds of a sync.
        maximum: The result if it would be larger.
    """
    once, each = seconds.per_step + sync_seconds, seconds.per_sample * fits
    clipped = (1 + fits / noise_scale) * (once + each) / fits
    for passes in range(2, math.ceil(maximum) + 1):
        # (1 + r / B) (once + passes each) / r < clipped, solved for 1 / r.
        inverse = clipped / (once + passes * each) - 1 / noise_scale if once + each > 0 else 0.0
        if inverse * fits * min(passes, maximum) > 1:
            return max(1 / (inverse * fits), passes - 1)
    return maximum
