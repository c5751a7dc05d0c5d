"""Moments against hand arithmetic, per-sample truth, and their expectation on a process with known S and |G|^2."""

import itertools

import numpy as np
import pytest

from adloco.rules.moments import Moments, estimate, group_moments


def moments_of(samples: np.ndarray, groups: list[int]) -> Moments:
    """Moments from per-sample gradients [b, d], grouped in order."""
    edges = np.cumsum([0, *groups])
    means = [samples[a:b].mean(0) for a, b in itertools.pairwise(edges)]
    mean = samples.mean(0)
    return group_moments(groups, [float(g @ g) for g in means], float(mean @ mean), [float(g @ mean) for g in means])


def test_by_hand() -> None:
    # Two groups of 1 and 3 samples with means (4, 0) and (0, 0): gbar = (1, 0).
    # scatter = 1*16 + 3*0 - 4*1 = 12, one degree of freedom, S = 12.
    # |G|^2 = 1 - 12/4 = -2 unbiased, 1 plug-in. <g_j, gbar> = 4 and 0: inner scatter = 1*(4-1)^2 + 3*(0-1)^2 = 12.
    moments = group_moments([1, 3], [16.0, 0.0], 1.0, [4.0, 0.0])
    assert moments == Moments(scatter=12, dof=1, mean_norm_sq=1, inverse_samples=0.25, inner_scatter=12, workers=1)
    result = estimate(moments)
    assert result is not None
    assert (result.grad_variance, result.grad_norm_sq, result.plugin_norm_sq, result.inner_variance) == (12, -2, 1, 12)
    assert result.noise_scale == float("inf")


def test_pooling_two_workers_by_hand() -> None:
    # Worker 1 as above (scatter 12, dof 1, |gbar|^2 1, b 4); worker 2: scatter 3, dof 2, |gbar|^2 9, b 6. S = 15/3 = 5.
    # |G|^2 = mean(1 - 5/4, 9 - 5/6) = mean(-0.25, 8.1667) = 3.958333.
    second = Moments(scatter=3, dof=2, mean_norm_sq=9, inverse_samples=1 / 6, workers=1)
    result = estimate(group_moments([1, 3], [16.0, 0.0], 1.0) + second)
    assert result is not None
    assert result.grad_variance == 5
    assert result.grad_norm_sq == pytest.approx((-0.25 + 9 - 5 / 6) / 2)
    assert result.noise_scale == pytest.approx(5 / ((-0.25 + 9 - 5 / 6) / 2))


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
    """4,000 draws of 16 samples: E[S^] = S and E[G2^] = |G|^2, within four standard errors of the Monte Carlo mean."""
    rng = np.random.default_rng(sum(groups) + len(groups))
    scales, mean = np.array([1.0, 2.0, 0.5]), np.array([0.3, -0.2, 0.9])
    true_s, true_g = float((scales**2).sum()), float(mean @ mean)
    draws = [estimate(moments_of(mean + scales * rng.normal(size=(16, 3)), groups)) for _ in range(4000)]
    for values, truth in (([d.grad_variance for d in draws if d], true_s), ([d.grad_norm_sq for d in draws if d], true_g)):
        assert np.mean(values) == pytest.approx(truth, abs=4 * np.std(values) / np.sqrt(len(values)))
    plugin = [d.plugin_norm_sq for d in draws if d]
    assert np.mean(plugin) == pytest.approx(true_g + true_s / 16, abs=4 * np.std(plugin) / np.sqrt(len(plugin)))


def test_workers_with_unequal_batches_pool_without_bias() -> None:
    rng = np.random.default_rng(5)
    mean, true_s = np.array([0.5, 0.1]), 2.0
    draws = []
    for _ in range(4000):
        workers = [moments_of(mean + rng.normal(size=(b, 2)), groups) for b, groups in ((3, [1, 2]), (8, [4, 4]), (5, [2, 2, 1]))]
        draws.append(estimate(sum(workers, start=Moments())))
    variance, norm = [d.grad_variance for d in draws if d], [d.grad_norm_sq for d in draws if d]
    assert np.mean(variance) == pytest.approx(true_s, abs=4 * np.std(variance) / np.sqrt(4000))
    assert np.mean(norm) == pytest.approx(0.26, abs=4 * np.std(norm) / np.sqrt(4000))
