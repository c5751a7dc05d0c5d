"""Gradient statistics for batch rules, as a few numbers per worker (docs/method.md).

A worker draws J groups of m_j samples, b in all. g_j is the mean gradient of group j, and gbar the
mean gradient of all samples. |g_j|^2 and |gbar|^2 alone give an unbiased estimate of S, the trace
of the per-sample gradient covariance, for any sizes of the groups. Workers that have the same
parameters are pooled by adding their numbers; no vector is exchanged. Source: AdLoCo (arXiv
2508.18182) section 3, McCandlish et al. (arXiv 1812.06162) appendix A.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Moments:
    """Statistics of gradients, summed over workers and test steps; they cross the network as they
    are, in float64.

    `group_moments` computes those of one step; add them with +. Each test step estimates S, |G|^2
    and Var<g_i, G> by itself. The estimates of |G|^2 are weighted by b^2, because their error is in
    proportion to S / b; the others by `dof`. Sums of squares tell how far the steps differ, and so
    how precise their mean is.
    """

    tests: float = 0.0
    """Number of test steps, each worker's counted."""
    weight: float = 0.0
    """Sum of b^2, with b the samples of a step."""
    norm_sq: float = 0.0
    """Sum of b^2 G2^, with G2^ = |gbar|^2 - S^ / b the step's unbiased estimate of |G|^2. Its own
    S^ is subtracted, not the mean of all steps: the norms of samples have heavy tails, which cancel
    only within a step."""
    norm_sq_squares: float = 0.0
    """Sum of b^2 (G2^)^2."""
    mean_norm_sq: float = 0.0
    """Sum of b^2 |gbar|^2, with |gbar|^2 the squared norm of the worker's mean gradient."""
    dof: float = 0.0
    """Degrees of freedom: the sum of the numbers of groups minus one."""
    scatter: float = 0.0
    """Sum of dof S^: of sum_j m_j |g_j|^2 - b |gbar|^2, whose expectation is dof S."""
    scatter_squares: float = 0.0
    """Sum of dof (S^)^2."""
    inner_scatter: float = 0.0
    """Sum of dof V^, with V^ an estimate of Var<g_i, G>, the variance over samples of the inner
    product with the true gradient G. Zero unless an inner-product test measures it.
    """

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*map(operator.add, astuple(self), astuple(other)))


def group_moments(
    group_samples: Sequence[int],
    group_norms_sq: Sequence[float],
    mean_norm_sq: float,
    inner_variance: float = 0.0,
) -> Moments:
    """The moments of one step of a worker from its groups; all zero if it has only one.

    Args:
        group_samples: m_j, the number of samples in each group.
        group_norms_sq: |g_j|^2, the squared norm of each group's *mean* gradient.
        mean_norm_sq: |gbar|^2, the squared norm of the mean gradient of all samples.
        inner_variance: The step's estimate of Var<g_i, G>, for the inner-product tests.

    Norms that are not finite, as where a loss was scaled too far, tell nothing: all are zero then.
    """
    samples = sum(group_samples)
    weighted = sum(m * norm for m, norm in zip(group_samples, group_norms_sq, strict=True))
    dof = len(group_samples) - 1
    if dof == 0 or not math.isfinite(weighted + mean_norm_sq):
        return Moments()
    # A scatter is never negative, but rounding can push that of equal gradients below zero.
    variance = max(0.0, weighted - samples * mean_norm_sq) / dof
    norm_sq, weight = mean_norm_sq - variance / samples, float(samples) ** 2
    return Moments(
        tests=1,
        weight=weight,
        norm_sq=weight * norm_sq,
        norm_sq_squares=weight * norm_sq**2,
        mean_norm_sq=weight * mean_norm_sq,
        dof=dof,
        scatter=dof * variance,
        scatter_squares=dof * variance**2,
        inner_scatter=dof * inner_variance,
    )


@dataclass(frozen=True, kw_only=True)
class GradientEstimate:
    """Estimates of a trainer's gradient statistics at one point."""

    grad_variance: float
    """S, the trace of the covariance of per-sample gradients."""
    grad_norm_sq: float
    """Unbiased estimate of |G|^2, which can be negative when noise dominates."""
    plugin_norm_sq: float
    """The published (plug-in) estimate of |G|^2: the mean of |gbar|^2, too large by S / b."""
    inner_variance: float = 0.0
    """Var<g_i, G> over samples, for the inner-product tests, in proportion to the square of
    `plugin_norm_sq`."""
    tests: float = 1.0
    """Test steps of which these are the means."""
    variance_spread: float = 0.0
    """Variance of the tests' S^ around their mean; 0 with one test."""
    norm_spread: float = 0.0
    """Variance of their estimates of |G|^2."""
    norm_factor: float = 1.0
    """|G|^2 is known to within this factor, one standard deviation up or down. A
    `BatchController`'s estimate has it, a single round's has 1."""
    variance_factor: float = 1.0
    """S is known to within this factor, likewise."""

    @property
    def noise_scale_factor(self) -> float:
        """The noise scale is known to within this factor: the errors of the logarithms of S and
        |G|^2, which have little in common, added as variances.
        """
        return math.exp(math.hypot(math.log(self.norm_factor), math.log(self.variance_factor)))

    @property
    def noise_scale(self) -> float:
        """The simple noise scale B = S / |G|^2 of McCandlish et al., in samples.

        Zero if S is not positive; otherwise infinite if |G|^2 is not.
        """
        if self.grad_variance <= 0:
            return 0.0
        return self.grad_variance / self.grad_norm_sq if self.grad_norm_sq > 0 else float("inf")


def estimate(moments: Moments) -> GradientEstimate | None:
    """Estimates of S, |G|^2 and Var<g_i, G> from summed moments; None if dof is zero, or a moment
    not finite, as a measurement of one's own may give them.

    Zero dof means that no worker had two groups to compare.
    """
    if moments.dof == 0 or not all(map(math.isfinite, astuple(moments))):
        return None
    grad_variance = moments.scatter / moments.dof
    norm_sq = moments.norm_sq / moments.weight

    def spread(squares: float, mean: float) -> float:
        """The variance of the tests' values from the mean of their squares."""
        tests = moments.tests
        return max(0.0, squares - mean**2) * tests / (tests - 1) if tests > 1 else 0.0

    return GradientEstimate(
        grad_variance=grad_variance,
        grad_norm_sq=norm_sq,
        plugin_norm_sq=moments.mean_norm_sq / moments.weight,
        inner_variance=moments.inner_scatter / moments.dof,
        tests=moments.tests,
        variance_spread=spread(moments.scatter_squares / moments.dof, grad_variance),
        norm_spread=spread(moments.norm_sq_squares / moments.weight, norm_sq),
    )
