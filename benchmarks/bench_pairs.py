"""Two ways to do the same, timed in turns, so that a busy machine slows both of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

QUICK_PAIRS = 4

Seconds = dict[str, list[float]]
"""The seconds of each side, by its name, in the order of the turns."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A comparison: a line of the first table of benchmarks/performance.md."""

    what: str
    against: str
    seconds: float
    """Median of what is measured."""
    against_seconds: float
    """Median of what it is compared with."""
    ratio: float
    """Median over the pairs of the first over the second."""
    low: float
    high: float
    """The quartiles of the pairs' ratios: half of the pairs lie between them."""
    pairs: int
    goal: float | None = None
    """The largest ratio that is good enough; None: there is no goal."""

    @classmethod
    def of(
        cls,
        what: str,
        against: str,
        seconds: Sequence[float],
        against_seconds: Sequence[float],
        *,
        goal: float | None = None,
        as_part_of: int = 1,
    ) -> "Row":
        """A row from the seconds of its pairs.

        Args:
            what: What was measured.
            against: What it is compared with.
            seconds: Seconds of the first, one of each pair.
            against_seconds: Seconds of the second.
            goal: See `Row.goal`.
            as_part_of: Both are one of so many equal steps, and only this one differs: the ratio is
                that of all these steps together.
        """
        ratios = [
            1 + (mine / other - 1) / as_part_of
            for mine, other in zip(seconds, against_seconds, strict=True)
        ]
        return cls(
            what=what,
            against=against,
            seconds=statistics.median(seconds),
            against_seconds=statistics.median(against_seconds),
            goal=goal,
            **spread(ratios),
        )


@dataclass(frozen=True, kw_only=True)
class Count:
    """Something that is counted: also a line of the first table."""

    what: str
    of: str
    """What it is compared with."""
    count: int
    goal: int
    """The largest count that is good enough."""


def spread(ratios: Sequence[float]) -> dict[str, Any]:
    """The median, the quartiles and the number of the pairs' ratios, as fields of a `Row`."""
    if len(ratios) == 1:
        return {"ratio": ratios[0], "low": ratios[0], "high": ratios[0], "pairs": 1}
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": median, "low": low, "high": high, "pairs": len(ratios)}


Sides = Mapping[str, Callable[[], Any]]
"""Functions by name."""


def chosen(cases: Sequence[tuple[Any, ...]], quick: bool) -> list[tuple[Any, ...]]:
    """The cases to measure, each of which ends with its number of pairs; a quick run takes the
    first one, with few pairs.
    """
    return [(*cases[0][:-1], QUICK_PAIRS)] if quick else list(cases)


def in_turns(
    sides: Sides,
    turns: int,
    *,
    meet: Callable[[], Any] = lambda: None,
    warm_up: int = 2,
    clock: Callable[[], Any] = time.perf_counter,
) -> Seconds:
    """Time several functions in turns, in the opposite order every other time.

    Args:
        turns: How often each is measured.
        meet: Called before and after each function; on several ranks, a barrier.
        warm_up: Turns before these that are not measured.
        clock: () -> seconds, or an array of several clocks.
    """
    seconds: Seconds = {name: [] for name in sides}
    for turn in range(-warm_up, turns):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            meet()
            began = clock()
            sides[name]()
            meet()
            if turn >= 0:
                seconds[name].append(clock() - began)
    return seconds
