"""Moments against hand arithmetic, per-sample truth, and their expectation on a process with known
S and |G|^2.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from adloco.rules.moments import Moments, estimate, group_moments


def moments_of(samples: np.ndarray, groups: list[int]) -> Moments:
    """Moments from per-sample gradients [b, d], grouped in order."""
    edges = np.cumsum([0, *groups])
    means = np.array([samples[a:b].mean(0) for a, b in itertools.pairwise(edges)])
    mean = samples.mean(0)
    return group_moments(groups, (means**2).sum(1), float(mean @ mean))


def test_by_hand() -> None:
    # Two groups of 1 and 3 samples with means (4, 0) and (0, 0): gbar = (1, 0). scatter = 1*16 +
    # 3*0 - 4*1 = 12, one degree of freedom, S = 12. |G|^2 = 1 - 12/4 = -2 unbiased, 1 plug-in.
    moments = group_moments([1, 3], [16.0, 0.0], 1.0, inner_variance=5.0)
    # Of four samples, so |G|^2 has the weight 16.
    assert moments == Moments(
        tests=1,
        weight=16,
        norm_sq=-32,
        norm_sq_squares=64,
        mean_norm_sq=16,
        dof=1,
        scatter=12,
        scatter_squares=144,
        inner_scatter=5,
    )
    result = estimate(moments)
    assert result is not None
    assert (
        result.grad_variance,
        result.grad_norm_sq,
        result.plugin_norm_sq,
        result.inner_variance,
    ) == (12, -2, 1, 5)
    assert result.noise_scale == float("inf")


@pytest.mark.parametrize("norm_sq", [math.nan, math.inf])
def test_norms_that_are_not_finite_tell_nothing(norm_sq: float) -> None:
    """Python's max(0.0, nan) is 0: no noise at all, for which one sample would be enough."""
    assert estimate(group_moments([2, 2], [3.0, norm_sq], 1.0)) is None
    assert estimate(group_moments([2, 2], [3.0, 1.0], norm_sq)) is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_moments_that_are_not_finite_are_no_estimate(number: float) -> None:
    """As a measurement of one's own may give them; they would count as a variance of zero."""
    fine = group_moments([2, 2], [4.0, 6.0], 1.0)
    for name in ("scatter", "norm_sq", "weight", "dof"):
        assert estimate(replace(fine, **{name: number})) is None


def test_pooling_two_workers_by_hand() -> None:
    # Worker 1 as above: S = 12, dof 1, |gbar|^2 = 1, b = 4, G2 = 1 - 12/4 = -2. Worker 2: S = 1.5,
    # dof 2, |gbar|^2 = 9, b = 6, G2 = 9 - 1.5/6 = 8.75. S = (12 + 3)/3 = 5; the weights are 16
    # and 36: (-32 + 315)/52.
    second = group_moments([2, 2, 2], [9.0, 9.0, 10.5], 9.0)
    result = estimate(group_moments([1, 3], [16.0, 0.0], 1.0) + second)
    assert result is not None
    assert (result.grad_variance, result.tests) == (5, 2)
    norm_sq = 283 / 52
    assert result.grad_norm_sq == pytest.approx(norm_sq)
    assert result.plugin_norm_sq == pytest.approx((16 * 1 + 36 * 9) / 52)
    assert result.noise_scale == pytest.approx(5 / norm_sq)
    # Of two values with weights, n / (n - 1) = 2 times the weighted mean of the squares.
    spread = 2 * (16 * (-2 - norm_sq) ** 2 + 36 * (8.75 - norm_sq) ** 2) / 52
    assert result.norm_spread == pytest.approx(spread)
    assert result.variance_spread == pytest.approx(2 * (1 * 7**2 + 2 * 3.5**2) / 3)
    # A third one as the second: S = (12 + 3 + 3) / 5 = 3.6, and n / (n - 1) = 3 / 2.
    result = estimate(group_moments([1, 3], [16.0, 0.0], 1.0) + second + second)
    assert result is not None
    assert result.variance_spread == pytest.approx(1.5 * (1 * 8.4**2 + 4 * 2.1**2) / 5)


def test_samples_with_long_norms_cancel_within_a_step() -> None:
    """Half of the steps draw samples whose noise is ten times as large. Each step's own S is
    subtracted, so |G|^2 is three times as precise as with the mean S of all steps.
    """
    rng = np.random.default_rng(3)
    own, common = [], []
    for _ in range(400):
        steps = []
        for _ in range(8):
            noise = rng.normal(size=(8, 200)) * (10.0 if rng.random() < 0.5 else 1.0)
            steps.append(moments_of(0.1 + noise, [2] * 4))
        total = sum(steps, start=Moments())
        found = estimate(total)
        assert found is not None
        own.append(found.grad_norm_sq)
        common.append(found.plugin_norm_sq - found.grad_variance / 8)
    assert np.mean(own) == pytest.approx(2.0, abs=4 * np.std(own) / np.sqrt(400))
    assert np.allclose(own, common), "with equal batches and groups both are the same"


def test_one_sample_per_group_is_the_sample_covariance() -> None:
    samples = np.random.default_rng(0).normal(size=(7, 5))
    result = estimate(moments_of(samples, [1] * 7))
    assert result is not None
    assert result.grad_variance == pytest.approx(np.trace(np.cov(samples.T, ddof=1)))


def test_equal_gradients_have_no_variance() -> None:
    samples = np.tile(np.array([[0.1, -0.7, 3.3]]), (9, 1))
    result = estimate(moments_of(samples, [2, 3, 4]))
    assert result is not None
    assert result.grad_variance == pytest.approx(0, abs=1e-12)
    assert result.grad_norm_sq == pytest.approx(0.1**2 + 0.7**2 + 3.3**2)


def test_one_group_says_nothing() -> None:
    assert estimate(group_moments([4], [2.0], 2.0)) is None


@pytest.mark.parametrize("groups", [[8, 8], [1, 15], [2, 3, 5, 6], [1] * 16])
def test_expectation_is_the_truth_for_any_grouping(groups: list[int]) -> None:
    """4,000 draws of 16 samples: E[S^] = S and E[G2^] = |G|^2, within four standard errors of the
    Monte Carlo mean.
    """
    rng = np.random.default_rng(sum(groups) + len(groups))
    scales, mean = np.array([1.0, 2.0, 0.5]), np.array([0.3, -0.2, 0.9])
    true_s, true_g = float((scales**2).sum()), float(mean @ mean)
    draws = [
        estimate(moments_of(mean + scales * rng.normal(size=(16, 3)), groups)) for _ in range(4000)
    ]
    for values, truth in (
        ([d.grad_variance for d in draws if d], true_s),
        ([d.grad_norm_sq for d in draws if d], true_g),
    ):
        assert np.mean(values) == pytest.approx(
            truth, abs=4 * np.std(values) / np.sqrt(len(values))
        )
    plugin = [d.plugin_norm_sq for d in draws if d]
    assert np.mean(plugin) == pytest.approx(
        true_g + true_s / 16, abs=4 * np.std(plugin) / np.sqrt(len(plugin))
    )


def test_workers_with_unequal_batches_pool_without_bias() -> None:
    rng = np.random.default_rng(5)
    mean, true_s = np.array([0.5, 0.1]), 2.0
    draws = []
    for _ in range(4000):
        workers = [
            moments_of(mean + rng.normal(size=(b, 2)), groups)
            for b, groups in ((3, [1, 2]), (8, [4, 4]), (5, [2, 2, 1]))
        ]
        draws.append(estimate(sum(workers, start=Moments())))
    variance, norm = [d.grad_variance for d in draws if d], [d.grad_norm_sq for d in draws if d]
    assert np.mean(variance) == pytest.approx(true_s, abs=4 * np.std(variance) / np.sqrt(4000))
    assert np.mean(norm) == pytest.approx(0.26, abs=4 * np.std(norm) / np.sqrt(4000))
