"""The loss that a run reaches with so many tokens, by a law fitted to short runs.

    L = L_inf + A (D / cost)^-p        cost = (1 + b / B) c_method H^beta

D is the tokens of all trainers, b the samples of a trainer's inner step, B the critical batch, H
the inner steps of a round, and c_method the tokens that a method needs for one token of the first.
1 + b / B is the price of large batches (McCandlish et al., arXiv 1812.06162): a step of batch b
makes the progress 1 / (1 + B / b), so that a token makes 1 / (1 + b / B) of the progress that it
makes in a tiny batch. Progress adds up over a run whose batch varies, so its cost is the harmonic
mean of 1 + b / B, weighted by tokens. The norm test at eta holds b at B / eta^2 (unbiased form),
which costs 1 + 1 / eta^2 (docs/plan.md).

What the runs cannot tell is left out, and said in `LossFit.assumptions`.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adloco.errors import require
from adloco.plan.calibration import Errors
from adloco.plan.loss_points import DISTINCT, TOO_CHEAP, Batch, LossPoint, Terms, tell
from adloco.plan.loss_search import EXPONENTS, search

LARGEST = 700.0
"""Logarithm from which numbers count as infinite."""


@dataclass(frozen=True, kw_only=True)
class LossLaw:
    """The constants of the law. `method`, `batch` and `sync_every` are those of a `LossPoint`."""

    irreducible: float
    """L_inf."""
    scale: float
    """A."""
    exponent: float
    """p."""
    critical_batch: float
    """B, in samples; infinite if batches cost nothing."""
    methods: Mapping[str, float]
    """Method -> c: its tokens for each of the first method, at H = 1 and the same batch."""
    sync_exponent: float
    """beta."""

    annealing: float = 1.0
    """Tokens that take the loss as low before the learning rate falls, for each with its fall."""

    def loss_at(self, tokens: float, *, method: str, batch: Batch, sync_every: float = 1) -> float:
        """The loss after so many tokens."""
        return self.loss_after(tokens / self.cost(method, batch, sync_every))

    def tokens_to(self, loss: float, *, method: str, batch: Batch, sync_every: float = 1) -> float:
        """The tokens until a loss; infinite if it is not above `irreducible`."""
        return self.cost(method, batch, sync_every) * self.effective_tokens_to(loss)

    def loss_after(self, effective_tokens: float) -> float:
        """The loss after so many tokens of cost 1."""
        return self.irreducible + self.scale * math.pow(effective_tokens, -self.exponent)

    def effective_tokens_to(self, loss: float) -> float:
        """The tokens of cost 1 until a loss."""
        if loss <= self.irreducible:
            return math.inf
        logarithm = math.log(self.scale / (loss - self.irreducible)) / self.exponent
        return math.exp(logarithm) if logarithm < LARGEST else math.inf

    def cost(self, method: str, batch: Batch, sync_every: float = 1) -> float:
        """Tokens for each token of the first method in tiny batches at H = 1; ValueError if the
        method was not measured.
        """
        require(
            method in self.methods,
            f"no short run has the method {method!r}; measured were "
            f"{', '.join(repr(name) for name in self.methods)}",
        )
        parts = batch if isinstance(batch, Mapping) else {batch: 1.0}
        progress = sum(part / (1 + size / self.critical_batch) for size, part in parts.items())
        mean = sum(parts.values()) / progress
        return mean * self.methods[method] * math.pow(sync_every, self.sync_exponent)

    def cost_of(self, point: LossPoint) -> float:
        """The cost of a point's tokens."""
        cost = self.cost(point.method, point.batch, point.sync_every)
        return cost if point.annealed else cost * self.annealing


@dataclass(frozen=True, kw_only=True)
class LossFit:
    """A law, and how far to trust it."""

    law: LossLaw
    assumptions: tuple[str, ...]
    """Sentences about what the runs could not tell."""
    runs: Errors | None
    """Relative errors of the predicted tokens to each run's final loss, by a law of the other runs;
    None if no run can be left out."""
    longest: Errors | None
    """Errors of the runs of the largest budget, by a law of the shorter ones; None if these have no
    law, or lack the methods."""
    draws: tuple[LossLaw, ...]
    """Laws of losses drawn around those of the law with the spread of the measured ones
    (parametric bootstrap); empty if the law has as many constants as there are points."""

    def tokens_interval(
        self, loss: float, *, method: str, batch: Batch, sync_every: float = 1
    ) -> tuple[float, float] | None:
        """The interval of the tokens to a loss that holds 90% of the draws; None without any."""
        found = sorted(
            law.tokens_to(loss, method=method, batch=batch, sync_every=sync_every)
            for law in self.draws
        )
        beyond = round(len(found) * (1 - 0.9) / 2)
        return (found[beyond], found[-1 - beyond]) if found else None


def fit_loss_law(points: Sequence[LossPoint], *, draws: int = 100) -> LossFit:
    """Fit the law to points of short runs, each run with the same weight.

    Args:
        points: Losses of runs that share model, text and evaluation set.
        draws: Laws of the bootstrap; 0 if no interval is wanted.

    Raises:
        ValueError: Fewer than two budgets were measured, or losses do not fall as tokens grow.
    """
    terms = tell(points)
    law = _fit(points, terms)
    require(
        law.exponent > 1.01 * EXPONENTS[0],
        "the measured losses do not fall as tokens grow, so no law can be fitted; give runs whose "
        "budgets differ more, or more seeds",
    )
    runs = dict.fromkeys(point.run for point in points)
    budget = max(point.tokens for point in points) / DISTINCT
    longest = [point.run for point in points if point.tokens > budget]
    return LossFit(
        law=law,
        assumptions=(*terms.assumptions, *_at_bounds(law, terms)),
        runs=_held_out(points, [[run] for run in runs]),
        longest=_held_out(points, [longest]),
        draws=tuple(itertools.islice(_drawn(points, terms, law), draws)),
    )


def _fit(points: Sequence[LossPoint], terms: Terms) -> LossLaw:
    """Fit the constants that the points can tell.

    A larger H never saves tokens: noise between two small ones would make a run of few syncs cheap.
    """
    found = search(terms.observe(points), terms.irreducible, terms.critical_batch)
    log_costs = iter(found.costs)
    costs = {method: math.exp(next(log_costs)) for method in terms.methods}
    law = LossLaw(
        irreducible=found.irreducible,
        scale=found.scale,
        exponent=found.exponent,
        critical_batch=found.critical_batch,
        methods={point.method: costs.get(point.method, 1.0) for point in points},
        sync_exponent=next(log_costs) if terms.sync_every else 0.0,
        annealing=math.exp(next(log_costs)) if terms.annealing else 1.0,
    )
    return law if law.sync_exponent >= 0 else _fit(points, replace(terms, sync_every=False))


def _drawn(points: Sequence[LossPoint], terms: Terms, law: LossLaw) -> Iterator[LossLaw]:
    """Laws of losses that are drawn around the law's, without end; none if no point is to spare."""
    random = np.random.default_rng(0)
    losses = np.array([law.loss_after(point.tokens / law.cost_of(point)) for point in points])
    errors = np.log([point.loss for point in points] / losses)
    spare = len(points) - terms.num_constants
    while spare > 0:
        noise = math.sqrt((errors**2).sum() / spare) * random.standard_normal(len(points))
        drawn = zip(points, (losses * np.exp(noise)).tolist(), strict=True)
        yield _fit([replace(point, loss=loss) for point, loss in drawn], terms)


def _held_out(points: Sequence[LossPoint], groups: Iterable[Collection[str]]) -> Errors | None:
    """Errors for each group of runs, by a law of all others; None if there are no such laws."""
    errors = []
    annealed = any(point.annealed for point in points)
    for left_out in groups:
        others = [point for point in points if point.run not in left_out]
        try:
            terms = tell(others)
        except ValueError:
            continue  # The others have one budget.
        law = _fit(others, terms)
        last = {
            point.run: point
            for point in sorted(points, key=lambda point: point.tokens)
            if point.run in left_out and point.method in law.methods and point.annealed == annealed
        }
        for point in last.values():
            predicted = law.cost_of(point) * law.effective_tokens_to(point.loss)
            errors.append(abs(predicted / point.tokens - 1))
    return Errors.of(errors)


def _at_bounds(law: LossLaw, terms: Terms) -> list[str]:
    """Sentences on fitted constants that lie at the end of what is searched."""
    found = []
    low, high = terms.critical_batch
    if low < high and not 1.05 * low < law.critical_batch < high / 1.05:
        end = "less" if law.critical_batch < math.sqrt(low * high) else "more"
        found.append(f"the critical batch is {law.critical_batch:.3g} samples or {end}")
    highest = terms.irreducible[1]  # 0 if it is not fitted.
    if law.irreducible > 0.999 * highest:
        found.append("L_inf is close to the lowest measured loss, so no lower loss is predicted")
    if law.irreducible < 0.001 * highest:
        found.append(f"the losses show no L_inf above 0; {TOO_CHEAP}")
    if terms.sync_every and law.sync_exponent == 0:
        found.append("the losses show no cost of a larger H, so H is taken to change no tokens")
    if law.exponent > 0.999 * EXPONENTS[1]:
        found.append(f"p is at its bound, {EXPONENTS[1]:g}")
    return found
