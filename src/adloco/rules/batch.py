"""How many samples a trainer asks for: the norm test and its relatives (DESIGN section 4; AdLoCo
section 3, arXiv 2508.18182).

A rule turns one smoothed estimate of the gradient's statistics into a number of samples, without
memory. The memory (smoothing, growth limits, what the trainer asks for now) is in `controller.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from adloco.errors import require
from adloco.rules.moments import GradientEstimate

UNBOUNDED = 2**40
"""A request that no machine serves: what a rule asks for when the estimated |G|^2 is not positive.
"""

Estimator = Literal["unbiased", "plug-in"]


class BatchRule(Protocol):
    """Decides a trainer's batch. `requested` is pure: the same numbers give the same answer on
    every rank.
    """

    @property
    def needs_moments(self) -> bool:
        """Whether workers must take gradient statistics for this rule."""
        ...

    @property
    def inner_products(self) -> Estimator | None:
        """How those statistics estimate Var<g_i, G>; None if this rule does not need it.

        Costs a second pass over the test step's samples, and copies of the gradient: one for the
        plug-in form, two for the unbiased one, which takes at least four groups.
        """
        ...

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        """Samples per inner step over all workers of the trainer.

        estimate: smoothed statistics, None if none were taken. trainer_samples: what the trainer
        has seen so far. current: what it asks for now.
        """
        ...


def groups_to_compare(rule: BatchRule) -> int:
    """The fewest groups of samples from which a worker's statistics say what the rule needs."""
    if rule.inner_products == "unbiased":
        return 4
    return 2 if rule.needs_moments else 1


def _samples(variance: float, tolerance: float, norm: float) -> int:
    """ceil(variance / (tolerance^2 norm)): the smallest b with variance / b <= tolerance^2 norm."""
    if variance <= 0:
        return 1
    allowed = tolerance**2 * norm
    return max(1, math.ceil(min(variance / allowed, UNBOUNDED))) if allowed > 0 else UNBOUNDED


def _check_estimator(estimator: str) -> None:
    require(
        estimator in ("unbiased", "plug-in"),
        f"batch.estimator must be unbiased or plug-in, got {estimator!r}",
    )


def _norm_sq(estimate: GradientEstimate, estimator: Estimator) -> float:
    return estimate.grad_norm_sq if estimator == "unbiased" else estimate.plugin_norm_sq


@dataclass(frozen=True, kw_only=True)
class ConstantBatch:
    """Keep the batch at what it is."""

    needs_moments = False
    inner_products = None

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        return current


@dataclass(frozen=True, kw_only=True)
class BatchWarmup:
    """Stage-wise warm-up: the batch of the last stage that has begun, in samples seen by the
    trainer.
    """

    batches: Sequence[int]
    """Batch of each stage after the initial one, in samples."""
    after_samples: Sequence[int]
    """When each of those stages begins, in samples seen by the trainer; increasing."""

    needs_moments = False
    inner_products = None

    def __post_init__(self) -> None:
        require(
            len(self.batches) == len(self.after_samples) > 0,
            f"batch.batches and batch.after_samples must have the same length, at least 1, got {len(self.batches)} and {len(self.after_samples)}",
        )
        require(min(self.batches) > 0, f"batch.batches must be > 0, got {list(self.batches)}")
        require(
            list(self.after_samples) == sorted(set(self.after_samples)),
            f"batch.after_samples must increase, got {list(self.after_samples)}",
        )

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        begun = [
            batch
            for batch, start in zip(self.batches, self.after_samples, strict=True)
            if trainer_samples >= start
        ]
        return begun[-1] if begun else current


@dataclass(frozen=True, kw_only=True)
class NormTest:
    """Norm test: S / b <= eta^2 |G|^2, so b = ceil(S / (eta^2 |G|^2)).

    Applied at every test, the plug-in form grows by at most 1/eta^2 and settles at B (1 - eta^2) /
    eta^2; the unbiased form settles at B / eta^2 with B = S / |G|^2. (One summary of the paper
    prints a square root around the bound; its dimensions and the original condition exclude it.)
    """

    eta: float = 0.8
    """Tolerated relative error of the gradient; smaller asks for more samples."""
    estimator: Estimator = "unbiased"
    """How |G|^2 is estimated: unbiased, or plug-in (as published, without the correction for the
    batch's own noise).
    """

    needs_moments = True
    inner_products = None

    def __post_init__(self) -> None:
        require(self.eta > 0, f"batch.eta must be > 0, got {self.eta}")
        _check_estimator(self.estimator)

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        return (
            current
            if estimate is None
            else _samples(estimate.grad_variance, self.eta, _norm_sq(estimate, self.estimator))
        )


@dataclass(frozen=True, kw_only=True)
class InnerProductTest:
    """Inner-product test: Var<g_i, G> / b <= theta^2 |G|^4 (Bollapragada, Byrd and Nocedal, arXiv
    1710.11258).
    """

    theta: float = 0.9
    """Tolerated relative error of the gradient's length along the true one."""
    estimator: Estimator = "unbiased"
    """How |G|^2 and Var<g_i, G> are estimated: unbiased, or plug-in (from the mean gradient, whose
    own noise adds S/b to the one and about tr(Sigma^2)/b to the other). Unbiased takes at least
    four samples a worker."""

    needs_moments = True

    def __post_init__(self) -> None:
        require(self.theta > 0, f"batch.theta must be > 0, got {self.theta}")
        _check_estimator(self.estimator)

    @property
    def inner_products(self) -> Estimator:
        return self.estimator

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        if estimate is None:
            return current
        norm_sq = _norm_sq(estimate, self.estimator)
        return _samples(estimate.inner_variance, self.theta, max(norm_sq, 0.0) ** 2)


@dataclass(frozen=True, kw_only=True)
class AugmentedInnerProductTest:
    """Inner-product test and orthogonality test together: the larger request of the two (arXiv
    1710.11258).

    Orthogonality: Var_orth / b <= nu^2 |G|^2, with Var_orth = S - Var<g_i, G> / |G|^2: the trace
    (not the mean over coordinates) of the covariance across G.
    """

    theta: float = 0.9
    """Tolerated relative error along the true gradient."""
    nu: float = 5.84
    """Tolerated relative error across the true gradient."""
    estimator: Estimator = "unbiased"
    """How |G|^2 and Var<g_i, G> are estimated: unbiased, or plug-in (from the mean gradient, whose
    own noise adds S/b to the one and about tr(Sigma^2)/b to the other). Unbiased takes at least
    four samples a worker."""

    needs_moments = True

    def __post_init__(self) -> None:
        require(self.theta > 0, f"batch.theta must be > 0, got {self.theta}")
        require(self.nu > 0, f"batch.nu must be > 0, got {self.nu}")
        _check_estimator(self.estimator)

    @property
    def inner_products(self) -> Estimator:
        return self.estimator

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        if estimate is None:
            return current
        norm_sq = max(_norm_sq(estimate, self.estimator), 0.0)
        if norm_sq == 0:
            return UNBOUNDED
        along = _samples(estimate.inner_variance, self.theta, norm_sq**2)
        across = _samples(
            estimate.grad_variance - estimate.inner_variance / norm_sq, self.nu, norm_sq
        )
        return max(along, across)
