"""What a norm test needs to know about a gradient, in a few numbers per worker (DESIGN section 4).

A worker draws J groups of m_j samples with mean gradients g_j. From |g_j|^2 and the |gbar|^2 of
their mean alone follows an unbiased estimate of S, the trace of the per-sample gradient covariance,
for any sizes of the groups. Several workers that stand at the same point are pooled by adding these
numbers; no vector is exchanged. Source: AdLoCo (arXiv 2508.18182) section 3, McCandlish et al.
(arXiv 1812.06162) appendix A.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Sums over workers of the sufficient statistics of their gradients. Moments add; one worker's
    are `group_moments`.
    """

    scatter: float = 0.0
    """sum_j m_j |g_j|^2 - b |gbar|^2; its expectation is dof * S."""
    dof: float = 0.0
    """Degrees of freedom: groups minus one."""
    mean_norm_sq: float = 0.0
    """|gbar|^2, the squared norm of the worker's mean gradient."""
    inverse_samples: float = 0.0
    """1 / b, with b the samples behind gbar."""
    inner_scatter: float = 0.0
    """dof times an estimate of Var<g_i, G>, unbiased or plug-in as `group_moments` was told.

    Zero unless inner products were taken.
    """
    workers: float = 0.0
    """How many workers are in these sums."""

    def __add__(self, other: "Moments") -> "Moments":
        return Moments.from_numbers(
            mine + theirs
            for mine, theirs in zip(self.to_numbers(), other.to_numbers(), strict=True)
        )

    def to_numbers(self) -> list[float]:
        """The float64 scalars that cross the network."""
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def from_numbers(numbers: Iterable[float]) -> "Moments":
        return Moments(
            **{field.name: number for field, number in zip(fields(Moments), numbers, strict=True)}
        )


def group_moments(
    group_samples: Sequence[int],
    group_norms_sq: Sequence[float],
    mean_norm_sq: float,
    inner_products: Sequence[float] = (),
    even_products: Sequence[float] = (),
) -> Moments:
    """Moments of one worker from its groups.

    Args:
        group_samples: m_j, the samples in each group.
        group_norms_sq: |g_j|^2 of each group's *mean* gradient.
        mean_norm_sq: |gbar|^2 of the mean over all samples.
        inner_products: <g_j, gbar>, only for the inner-product tests.
        even_products: <g_j, gbar_even>, where gbar_even is the mean over the samples of the groups
            0, 2, 4, ... With them, Var<g_i, G> is estimated without bias, from at least four groups
            (fewer give nan). Without them it is the plug-in form gbar' Sigma^ gbar, whose
            expectation is larger by tr(Sigma^2) / b for Gaussian gradients.
    """
    samples = sum(group_samples)
    weighted = sum(m * norm for m, norm in zip(group_samples, group_norms_sq, strict=True))
    dof = len(group_samples) - 1
    if len(even_products):
        variance = _inner_variance(group_samples, group_norms_sq, inner_products, even_products)
        inner_scatter = dof * variance
    else:
        pairs = zip(group_samples, inner_products, strict=False)
        inner_scatter = sum(m * (inner - mean_norm_sq) ** 2 for m, inner in pairs)
    return Moments(
        # Rounding can push the scatter of equal gradients just below zero, which no scatter is.
        scatter=max(0.0, weighted - samples * mean_norm_sq),
        dof=dof,
        mean_norm_sq=mean_norm_sq,
        inverse_samples=1 / samples,
        inner_scatter=inner_scatter,
        workers=1,
    )


@dataclass(frozen=True, kw_only=True)
class GradientEstimate:
    """Estimates of a trainer's gradient statistics at one point."""

    grad_variance: float
    """S: trace of the covariance of per-sample gradients."""
    grad_norm_sq: float
    """|G|^2, unbiased: can be negative when noise dominates."""
    plugin_norm_sq: float
    """Mean over workers of |gbar|^2, which overestimates |G|^2 by S/b: the published form."""
    inner_variance: float = 0.0
    """Var<g_i, G> over samples, for the inner-product tests; in units of |G|^4.

    The unbiased form can be negative.
    """

    @property
    def noise_scale(self) -> float:
        """B = S / |G|^2 in samples (the simple noise scale); infinite where the estimate of |G|^2
        is not positive.
        """
        if self.grad_variance <= 0:
            return 0.0
        return self.grad_variance / self.grad_norm_sq if self.grad_norm_sq > 0 else float("inf")


def estimate(moments: Moments) -> GradientEstimate | None:
    """S, |G|^2 and the noise scale from pooled moments; None when no worker had two groups."""
    if moments.dof == 0:
        return None
    grad_variance = moments.scatter / moments.dof
    plugin = moments.mean_norm_sq / moments.workers
    return GradientEstimate(
        grad_variance=grad_variance,
        grad_norm_sq=plugin - grad_variance * moments.inverse_samples / moments.workers,
        plugin_norm_sq=plugin,
        inner_variance=moments.inner_scatter / moments.dof,
    )


def _inner_variance(
    samples: Sequence[int],
    norms_sq: Sequence[float],
    inner_products: Sequence[float],
    even_products: Sequence[float],
) -> float:
    """Var<g_i, G> = G' Sigma G, unbiased for independent samples of any distribution.

    The mean gradients a and b of the even and the odd groups are independent. Only products of
    *different* groups are used, whose expectations hold no fourth moment and no tr(Sigma^2): with
    F = |G|^4 and V = Var<g_i, G>, distinct groups j, k, l, n have

        E[<g_j, g_k> <g_j, g_l>] = F + V / m_j        E[<g_j, g_k> <g_l, g_n>] = F

    See `_Half` for the three means that are taken. Their weights below are those for which F
    and every term of first order in the noise of a product cancel, so that the estimate is as
    precise where |G|^2 is large as where it is small. nan from fewer than four groups.
    """
    if len(samples) < 4:
        return math.nan
    even_samples, odd_samples = sum(samples[::2]), sum(samples[1::2])
    total = even_samples + odd_samples
    odd_products = [
        (total * inner - even_samples * even) / odd_samples
        for inner, even in zip(inner_products, even_products, strict=True)
    ]
    a = _Half.of(samples[::2], norms_sq[::2], even_products[::2], odd_products[::2])
    b = _Half.of(samples[1::2], norms_sq[1::2], odd_products[1::2], even_products[1::2])
    shared = (a.with_both + b.with_both) / 2
    crossed = (a.crossed + b.crossed) / 4
    # E[shared] = F + V (a.weight + b.weight) / 2 and E[a.within b.within] = F. E[a.crossed] is
    # F + V / odd_samples, as both products share the mean of the odd groups; b.crossed likewise.
    factor = (a.weight + b.weight) / 2 - (1 / odd_samples + 1 / even_samples) / 4
    return (shared - crossed - a.within * b.within / 2) / factor


@dataclass(frozen=True, kw_only=True)
class _Half:
    """Means of products over the groups of one half, every pair j, k weighted by m_j m_k."""

    within: float
    """Mean of <g_j, g_k> over pairs of different groups."""
    with_both: float
    """Mean of <g_j, g_k> <g_j, other> over such pairs, with the mean gradient of the other half."""
    crossed: float
    """Mean of <g_j, other> <g_k, other> over such pairs."""
    weight: float
    """Mean of 1 / m_j over such pairs."""

    @staticmethod
    def of(
        samples: Sequence[int],
        norms_sq: Sequence[float],
        own_products: Sequence[float],
        other_products: Sequence[float],
    ) -> "_Half":
        """From <g_j, own> and <g_j, other>, with the mean gradients of this half and the other."""
        size = sum(samples)
        pairs = size**2 - sum(m**2 for m in samples)
        # sum over k != j of m_j m_k <g_j, g_k>, as a part of all pairs.
        own = [
            m * (size * product - m * norm) / pairs
            for m, product, norm in zip(samples, own_products, norms_sq, strict=True)
        ]
        other = [m * product for m, product in zip(samples, other_products, strict=True)]
        return _Half(
            within=sum(own),
            with_both=sum(o * product for o, product in zip(own, other_products, strict=True)),
            crossed=(sum(other) ** 2 - sum(product**2 for product in other)) / pairs,
            weight=sum(size - m for m in samples) / pairs,
        )
