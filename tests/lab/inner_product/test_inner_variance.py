"""Var<g_i, G> against hand arithmetic, and its expectation on processes where it is known."""

import itertools
import math

import numpy as np
import pytest

from adloco.lab.inner_product.inner_variance import plug_in, unbiased
from adloco.rules.moments import Moments, estimate, group_moments


def moments_of(samples: np.ndarray, groups: list[int], estimator: str = "unbiased") -> Moments:
    """Moments from per-sample gradients [b, d], grouped in order."""
    edges = np.cumsum([0, *groups])
    means = np.array([samples[a:b].mean(0) for a, b in itertools.pairwise(edges)])
    mean, even = samples.mean(0), np.average(means[::2], axis=0, weights=groups[::2])
    norms_sq, mean_norm_sq, products = (means**2).sum(1), float(mean @ mean), means @ mean
    variance = (
        unbiased(groups, norms_sq, products, means @ even)
        if estimator == "unbiased"
        else plug_in(groups, mean_norm_sq, products)
    )
    return group_moments(groups, norms_sq, mean_norm_sq, variance)


def test_plug_in_by_hand() -> None:
    """Two groups of 1 and 3 samples with means (4, 0) and (0, 0): gbar = (1, 0), <g_j, gbar> = 4
    and 0, so 1 (4 - 1)^2 + 3 (0 - 1)^2 = 12 with one degree of freedom.
    """
    assert plug_in([1, 3], 1.0, [4.0, 0.0]) == 12
    assert plug_in([4], 2.0, [2.0]) == 0


def test_unbiased_inner_variance_by_hand() -> None:
    """Four groups of one sample in one dimension: 1, 2, 3 and 6, so that every product is a number.

    The even half is 1 and 3 (mean 2), the odd half 2 and 6 (mean 4). Within the halves the products
    of a pair are u = 3 and 12. Each group's product with the mean of the other half is q = 4 and 12
    (even), 4 and 12 (odd). Mean of u q in each half: 3 * 8 = 24 and 12 * 8 = 96; mean of q q' over
    the pair: 48 and 48.
    The numerator is (24 + 96) / 2 - (48 + 48) / 4 - 3 * 12 / 2 = 60 - 24 - 18 = 18. Its expectation
    is Var<g_i, G> (1 - 1/4 (1/2 + 1/2)) = 3/4 of it, so 24; times three degrees of freedom, 72.
    """
    groups = np.array([[1.0], [2.0], [3.0], [6.0]])
    moments = moments_of(groups, [1] * 4)
    assert moments.inner_scatter == pytest.approx(72)
    result = estimate(moments)
    assert result is not None
    assert result.inner_variance == pytest.approx(24)


def test_unbiased_inner_variance_needs_four_groups() -> None:
    samples = np.random.default_rng(0).normal(size=(6, 2))
    assert math.isnan(moments_of(samples, [2, 2, 2]).inner_scatter)
    assert math.isfinite(moments_of(samples, [2, 2, 1, 1]).inner_scatter)


def test_equal_gradients_have_no_inner_variance() -> None:
    samples = np.tile(np.array([[0.1, -0.7, 3.3]]), (9, 1))
    assert moments_of(samples, [3, 2, 2, 2]).inner_scatter == pytest.approx(0, abs=1e-9)


GROUPINGS = [
    [[1, 1, 1, 1]],
    [[2, 2, 2, 2, 1]],
    [[5, 1, 3, 2, 2, 4]],
    [[1, 1, 1, 1], [4, 3, 3, 3], [2] * 6],
]
"""Groups of each worker."""


@pytest.mark.parametrize("noise", ["gaussian", "exponential"])
@pytest.mark.parametrize("workers", GROUPINGS, ids=str)
def test_inner_variance_is_unbiased_whatever_the_distribution(
    workers: list[list[int]], noise: str
) -> None:
    """1,000 draws: the mean is Var<g_i, G> = G' Sigma G within four standard errors.

    The plug-in form is above it by tr(Sigma^2) / b where the distribution is Gaussian, and by more
    than that where it is skewed towards G.
    """
    rng = np.random.default_rng(1)
    scales, mean = np.linspace(0.2, 2.0, 20), np.full(20, 0.2)
    true = float(((scales * mean) ** 2).sum())

    def draw(count: int) -> np.ndarray:
        size = (count, 20)
        noises = rng.normal(size=size) if noise == "gaussian" else rng.exponential(size=size) - 1
        return np.asarray(mean + scales * noises)

    values: dict[str, list[float]] = {"unbiased": [], "plug-in": []}
    for _ in range(1000):
        drawn = [draw(sum(groups)) for groups in workers]
        for estimator, found in values.items():
            pairs = zip(drawn, workers, strict=True)
            parts = [moments_of(samples, groups, estimator) for samples, groups in pairs]
            result = estimate(sum(parts, start=Moments()))
            assert result is not None
            found.append(result.inner_variance)
    exact, above = values.values()
    assert np.mean(exact) == pytest.approx(true, abs=4 * np.std(exact) / np.sqrt(1000))

    dofs = [len(groups) - 1 for groups in workers]
    inverse = np.average([1 / sum(groups) for groups in workers], weights=dofs)
    biased, error = true + inverse * float((scales**4).sum()), 4 * np.std(above) / np.sqrt(1000)
    if noise == "gaussian":
        assert np.mean(above) == pytest.approx(biased, abs=error)
    else:
        assert np.mean(above) > biased + error


def test_the_noise_of_products_cancels_where_the_signal_is_large() -> None:
    """|G| = 100 is far above the noise of unit variance: the estimates spread about as the truth.

    Terms of the size |G|^2 |g_j - G|^2, hundreds of times larger, must cancel exactly.
    """
    rng = np.random.default_rng(2)
    mean = np.full(100, 10.0)
    draws = [
        estimate(moments_of(mean + rng.normal(size=(7, 100)), [2, 2, 1, 1, 1])) for _ in range(1000)
    ]
    values = [draw.inner_variance for draw in draws if draw]
    assert np.mean(values) == pytest.approx(10_000, abs=4 * np.std(values) / np.sqrt(1000))
    assert np.std(values) < 10_000 * 1.2
