"""Means over seeds, and differences between arms with an interval."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number over several seeds."""

    mean: float | None
    """None if no seed has the number."""
    lowest: float | None
    highest: float | None
    count: int
    """Seeds that have the number."""

    @staticmethod
    def of(values: Sequence[float | None]) -> "Spread":
        """The spread of the values that are known."""
        known = [value for value in values if value is not None]
        return Spread(
            mean=statistics.fmean(known) if known else None,
            lowest=min(known, default=None),
            highest=max(known, default=None),
            count=len(known),
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of first - second over the seeds that both have."""

    first: str
    second: str
    mean: float
    half_width: float | None
    """Half of the 95% interval of the mean; None for one seed, which says nothing of the spread."""
    seeds: int

    @property
    def clear(self) -> bool:
        """True if the interval does not contain 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def paired_difference(
    first: str, second: str, values: Mapping[str, Mapping[int, float]]
) -> Difference | None:
    """The first arm minus the second, paired by seed, with its interval; None if they share none.

    values: Arm -> seed -> number.
    """
    shared = sorted(values[first].keys() & values[second].keys())
    differences = [values[first][seed] - values[second][seed] for seed in shared]
    if not differences:
        return None
    half = None
    if len(differences) > 1:
        freedom = len(differences) - 1
        # Behind the table: the first terms of an expansion in 1 / freedom, right to 0.002.
        beyond = 1.96 + 2.37 / freedom + 2.8 / freedom**2
        quantile = STUDENT_T[freedom - 1] if freedom <= len(STUDENT_T) else beyond
        half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(
        first=first,
        second=second,
        mean=statistics.fmean(differences),
        half_width=half,
        seeds=len(differences),
    )


def first_crossing(x: Sequence[float], y: Sequence[float | None], target: float) -> float | None:
    """Place where a curve first reaches a target from above, on the line between its points.

    Args:
        x: Ascending places.
        y: Values there; None where nothing was measured.

    Returns:
        The place; None if the curve stays above, or is below at its first point, because it was
        there before and nobody knows since when.
    """
    before: tuple[float, float] | None = None
    for at, value in zip(x, y, strict=True):
        if value is None:
            continue
        if value <= target:
            if before is None:
                return float(at) if value == target else None
            return before[0] + (at - before[0]) * (before[1] - target) / (before[1] - value)
        before = (float(at), value)
    return None
