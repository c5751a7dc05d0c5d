"""Var<g_i, G> of a worker's samples, from the groups of a test step (README.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def plug_in(samples: Sequence[int], mean_norm_sq: float, inner_products: Sequence[float]) -> float:
    """gbar' Sigma^ gbar with the sample covariance Sigma^ of the groups.

    Its expectation is too large by tr(Sigma^2) / b for Gaussian gradients with covariance Sigma.

    Args:
        samples: m_j, the number of samples in each group.
        mean_norm_sq: |gbar|^2, the squared norm of the mean gradient of all samples.
        inner_products: <g_j, gbar> for each group.
    """
    pairs = zip(samples, inner_products, strict=True)
    return sum(m * (product - mean_norm_sq) ** 2 for m, product in pairs) / max(1, len(samples) - 1)


def unbiased(
    samples: Sequence[int],
    norms_sq: Sequence[float],
    inner_products: Sequence[float],
    even_products: Sequence[float],
) -> float:
    """Estimate Var<g_i, G> = G' Sigma G without bias, for samples of any distribution.

    The even groups 0, 2, 4, ... and the odd groups are two halves, whose mean gradients are
    independent. Only products of *different* groups are used. Their expectations contain no fourth
    moment and no tr(Sigma^2): with F = |G|^4 and V = Var<g_i, G>, distinct groups j, k, l, n have

        E[<g_j, g_k> <g_j, g_l>] = F + V / m_j        E[<g_j, g_k> <g_l, g_n>] = F

    `_Half` has the three means that are combined here. With the weights below, F and every term of
    first order in the noise of a product cancel, so the estimate is as precise if |G|^2 is large as
    if it is small. Fewer than four groups give nan.
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
    # a is the even half and b the odd one. E[shared] = F + V (a.weight + b.weight) / 2 and
    # E[a.within b.within] = F. E[a.crossed] = F + V / odd_samples, because both of its products
    # contain the mean of the odd groups, and E[b.crossed] = F + V / even_samples.
    factor = (a.weight + b.weight) / 2 - (1 / odd_samples + 1 / even_samples) / 4
    return (shared - crossed - a.within * b.within / 2) / factor


@dataclass(frozen=True, kw_only=True)
class _Half:
    """Means over the pairs of different groups j, k of one half, each pair weighted by m_j m_k.

    `other` is the mean gradient of the other half.
    """

    within: float
    """Mean of <g_j, g_k>."""
    with_both: float
    """Mean of <g_j, g_k> <g_j, other>."""
    crossed: float
    """Mean of <g_j, other> <g_k, other>."""
    weight: float
    """Mean of 1 / m_j."""

    @staticmethod
    def of(
        samples: Sequence[int],
        norms_sq: Sequence[float],
        own_products: Sequence[float],
        other_products: Sequence[float],
    ) -> "_Half":
        """The means of one half.

        Args:
            samples: m_j of each group of this half.
            norms_sq: |g_j|^2 of each.
            own_products: <g_j, own> of each, with own the mean gradient of this half.
            other_products: <g_j, other> of each.
        """
        size = sum(samples)
        pairs = size**2 - sum(m**2 for m in samples)
        # For each j, the sum over k != j of m_j m_k <g_j, g_k>, over the sum of all weights.
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
