"""Losses that short runs have reached, and which constants of the law (loss_law.py) they can tell.

Constants are told within methods (docs/plan.md says what for): what differs between methods alone
cannot be told from what the methods themselves cost.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adloco.errors import require
from adloco.plan.loss_search import Observations

DISTINCT = 1.2
"""Budgets, batches and H that differ by less than this factor count as one."""
BATCH_RANGE = 30.0
"""B is searched for between the smallest batch over this and the largest times this."""
HIGHEST_IRREDUCIBLE = 0.99
"""The highest L_inf that is tried, as a part of the lowest loss."""
TOO_CHEAP = "losses far below the measured ones need more tokens than predicted"
"""Sentence about a law with L_inf = 0."""

Batch = float | Mapping[float, float]
"""Samples of a trainer's inner step; if it varies, each batch and the tokens trained with it."""


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """A loss that a run has reached."""

    run: str
    method: str
    """Points with the same method share its cost."""
    tokens: float
    """D, of all trainers."""
    loss: float
    """On the evaluation set."""
    batch: Batch
    sync_every: float = 1
    """H; 1 for methods without local steps."""
    annealed: bool = True
    """True if the learning rate has fallen to its end, False if it has not begun to fall."""

    @property
    def batches(self) -> Mapping[float, float]:
        """Each batch and its part of the tokens."""
        parts = self.batch if isinstance(self.batch, Mapping) else {self.batch: 1.0}
        total = sum(parts.values())
        return {batch: part / total for batch, part in parts.items()}

    @property
    def mean_batch(self) -> float:
        """Mean over tokens, in samples."""
        return sum(batch * part for batch, part in self.batches.items())


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The constants that points can tell, and what is assumed of the others."""

    methods: tuple[str, ...]
    """Methods with a cost of their own; the cost of all others is 1."""
    sync_every: bool
    """True if H has an exponent."""
    annealing: bool
    """True if losses before the learning rate falls have a cost of their own."""
    irreducible: tuple[float, float]
    """Lowest and highest L_inf; equal if it is not fitted."""
    critical_batch: tuple[float, float]
    """Lowest and highest B, in samples; equal if it is not fitted, infinite if it is left out."""
    assumptions: tuple[str, ...]
    """Sentences on what is not fitted."""

    @property
    def num_constants(self) -> int:
        """Constants that are fitted."""
        searched = sum(low < high for low, high in (self.irreducible, self.critical_batch))
        return 2 + searched + len(self.methods) + self.sync_every + self.annealing

    def observe(self, points: Sequence[LossPoint]) -> Observations:
        """The points as arrays, with a column for each constant of the cost. The points of a run
        share its weight.
        """
        counts = Counter(point.run for point in points)
        batches = sorted({batch for point in points for batch in point.batches})
        columns = [[float(point.method == method) for method in self.methods] for point in points]
        for row, point in zip(columns, points, strict=True):
            row += [math.log(point.sync_every)] if self.sync_every else []
            row += [float(not point.annealed)] if self.annealing else []
        return Observations(
            tokens=np.array([point.tokens for point in points], float),
            losses=np.array([point.loss for point in points], float),
            weights=np.array([1 / counts[point.run] for point in points]),
            batches=np.array(batches, float),
            shares=np.array([[point.batches.get(at, 0.0) for at in batches] for point in points]),
            columns=np.array(columns, float),
        )


def tell(points: Sequence[LossPoint]) -> Terms:
    """Find out which constants the points can tell; ValueError with fewer than two budgets."""
    methods = list(dict.fromkeys(point.method for point in points))
    groups = [[point for point in points if point.method == method] for method in methods]
    assumptions = []
    budgets = _most(groups, lambda point: point.tokens)
    if budgets < 2 and len(methods) > 1:
        # Without costs of their own, the methods' budgets together can tell p.
        methods, budgets = methods[:1], _most([points], lambda point: point.tokens)
        assumptions.append(
            "no method was measured at two budgets, so all are taken to need the same tokens"
        )
    sizes = [point.tokens for point in points]
    seen = f"runs of {min(sizes):,.0f} to {max(sizes):,.0f} tokens" if sizes else "no run"
    require(
        budgets >= 2,
        f"a law of the loss needs runs of two budgets, one at least {DISTINCT} times the other, "
        f"got {seen}; train another with, for instance, half as many",
    )
    # One batch of each run: within a run, batch and tokens may grow together.
    last = [[*{point.run: point for point in group}.values()] for group in groups]
    several_h = _most(groups, lambda point: point.sync_every) >= 2
    if not several_h and any(point.sync_every > 1 for point in points):
        assumptions.append("no method was measured with two H, so H is taken to change no tokens")
    if several_h and not any(map(_apart, last)):
        several_h = False
        assumptions.append(
            "H was changed together with the batch alone, so what both cost counts as the batch's"
        )
    annealing = _most(groups, lambda point: 1 + point.annealed) >= 2
    if not annealing and len({point.annealed for point in points}) > 1:
        assumptions.append(
            "methods differ in whether their learning rate had fallen, which counts as their cost"
        )
    irreducible = (0.0, HIGHEST_IRREDUCIBLE * min(point.loss for point in points))
    if budgets < 3:
        irreducible = (0.0, 0.0)
        assumptions.append(
            "no method was measured at three budgets, so the irreducible loss L_inf is taken as 0; "
            f"{TOO_CHEAP}"
        )
    batches = [point.mean_batch for group in last for point in group]
    critical_batch = (min(batches) / BATCH_RANGE, max(batches) * BATCH_RANGE)
    if _most(last, lambda point: point.mean_batch) < 2:
        critical_batch = (math.inf, math.inf)
        assumptions.append(
            "no method was measured with two batches, so larger ones are taken to need no more "
            "tokens"
        )
    return Terms(
        methods=tuple(methods[1:]),
        sync_every=several_h,
        annealing=annealing,
        irreducible=irreducible,
        critical_batch=critical_batch,
        assumptions=tuple(assumptions),
    )


def _apart(points: Sequence[LossPoint]) -> bool:
    """True if two points differ in H and not in their batch, or in their batch and not in H."""

    def differ(one: float, other: float) -> bool:
        return max(one, other) >= DISTINCT * min(one, other)

    return any(
        differ(one.sync_every, other.sync_every) != differ(one.mean_batch, other.mean_batch)
        for one, other in itertools.combinations(points, 2)
    )


def _most(groups: Sequence[Sequence[LossPoint]], value: Callable[[LossPoint], float]) -> int:
    """The most values that the points of one group have; values that are close count as one."""
    most = 0
    for points in groups:
        count, last = 0, 0.0
        for found in sorted(value(point) for point in points):
            if found >= DISTINCT * last:
                count, last = count + 1, found
        most = max(most, count)
    return most
