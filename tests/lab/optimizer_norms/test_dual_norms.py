"""Dual norms of gradients against hand arithmetic and the truth of processes with known noise."""

import itertools
import math

import numpy as np
import pytest

from adloco.lab.optimizer_norms.dual_norms import DualNorms, by_elements, by_singular_values, c4
from adloco.rules.moments import estimate


def test_by_hand() -> None:
    # Two parts whose steps have the lengths 1 and 2: noise 3 + 2 * 1, |gbar| 4 + 2 * 2, and noise
    # in it 1 + 2 * 0.75. S = 25, |G|^2 = 64 - 6.25.
    first = DualNorms(noise=3.0, mean=4.0, mean_noise=1.0)
    both = first + DualNorms(noise=1.0, mean=2.0, mean_noise=0.75).times(2.0)
    moments = both.moments(groups=4, samples=16)
    assert (moments.scatter, moments.dof, moments.weight) == (75, 3, 256)
    found = estimate(moments)
    assert found is not None
    assert (found.grad_variance, found.grad_norm_sq, found.plugin_norm_sq) == (25, 57.75, 64)


def test_equal_gradients_have_no_noise() -> None:
    found = estimate(DualNorms(noise=0.0, mean=2.0, mean_noise=0.0).moments(groups=4, samples=16))
    assert found is not None
    assert (found.grad_variance, found.grad_norm_sq, found.noise_scale) == (0, 4, 0)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_the_mean_of_a_sample_deviation(count: int) -> None:
    draws = np.random.default_rng(count).normal(size=(200_000, count)).std(1, ddof=1)
    assert c4(count) == pytest.approx(draws.mean(), abs=4 * draws.std() / math.sqrt(len(draws)))


SIZE = 20_000


def elements(samples: np.ndarray, groups: list[int]) -> DualNorms:
    """From samples [b, n], by the definitions."""
    edges = np.cumsum([0, *groups])
    means = np.array([samples[a:b].mean(0) for a, b in itertools.pairwise(edges)])
    mean = samples.mean(0)
    variance = np.array(groups) @ (means - mean) ** 2 / (len(groups) - 1)
    return by_elements(
        float(np.sqrt(variance).sum()),
        float(np.abs(mean).sum()),
        groups=len(groups),
        samples=len(samples),
    )


@pytest.mark.parametrize("groups", [[8, 8], [4] * 4, [3, 3, 2, 2, 2, 2, 1, 1]])
@pytest.mark.parametrize("signal", [0.2, 1.0])
def test_elements_with_signal_and_noise_alike(groups: list[int], signal: float) -> None:
    """Normal means of a fifth of their deviations, where the norm of the mean is 1.6 times the
    truth without a correction, and of as much.
    """
    rng = np.random.default_rng(1)
    sigma = rng.lognormal(sigma=0.5, size=SIZE)
    mean = signal * sigma * rng.normal(size=SIZE)
    noises, norms, plugins = [], [], []
    for _ in range(20):
        samples = mean + sigma * rng.normal(size=(16, SIZE))
        found = estimate(elements(samples, groups).moments(len(groups), sum(groups)))
        assert found is not None
        noises.append(math.sqrt(found.grad_variance))
        norms.append(found.grad_norm_sq)
        plugins.append(found.plugin_norm_sq)
    assert np.mean(noises) == pytest.approx(sigma.sum(), rel=0.01)
    assert np.mean(norms) == pytest.approx(np.abs(mean).sum() ** 2, rel=0.05)
    too_large = math.sqrt(1 + 1 / (16 * signal**2))
    assert math.sqrt(np.mean(plugins)) == pytest.approx(too_large * np.abs(mean).sum(), rel=0.02)


@pytest.mark.parametrize(
    ("signal", "factor"), [(np.full(4000, 0.1), 0.81), (10.0 * (np.arange(4000) < 40), 2.2)]
)
def test_elements_whose_signal_is_not_like_their_noise(signal: np.ndarray, factor: float) -> None:
    """All elements alike: 20% too small. A hundredth of them with all the signal: too large."""
    rng = np.random.default_rng(2)
    norms = []
    for _ in range(30):
        found = estimate(elements(signal + rng.normal(size=(16, 4000)), [4] * 4).moments(4, 16))
        assert found is not None
        norms.append(found.grad_norm_sq)
    assert math.sqrt(np.mean(norms)) == pytest.approx(factor * np.abs(signal).sum(), rel=0.03)


def spectrum(samples: np.ndarray, groups: int) -> tuple[DualNorms, float]:
    """From samples [b, n, m], n <= m, in equal groups; and tr C^(1/2) of the sample covariance."""
    means = samples.reshape(groups, -1, *samples.shape[1:]).mean(1)
    deviations = means - means.mean(0)
    covariance = (
        len(samples) / groups * np.einsum("jik,jlk->il", deviations, deviations) / (groups - 1)
    )
    root = float(np.sqrt(np.linalg.eigvalsh(covariance).clip(0)).sum())
    contrast = (means[::2].mean(0) - means[1::2].mean(0)) / 2
    norms = [
        float(np.linalg.svd(each, compute_uv=False).sum()) for each in (means.mean(0), contrast)
    ]
    return by_singular_values(root, *norms, groups=groups, samples=len(samples)), root


@pytest.mark.parametrize(
    ("shape", "groups", "low", "left"),
    [((40, 40), 4, 0.043, 0.02), ((40, 40), 2, 0.151, 0.16), ((20, 60), 4, 0.015, 0.01)],
)
def test_singular_values_of_independent_elements(
    shape: tuple[int, int], groups: int, low: float, left: float
) -> None:
    """C is the number of columns times the unit matrix. G is of the same kind as the noise."""
    rng, noises, roots, norms = np.random.default_rng(3), [], [], []
    mean = 0.3 * rng.normal(size=shape)
    truth = shape[0] * math.sqrt(shape[1])
    for _ in range(20):
        norm, root = spectrum(mean + rng.normal(size=(8, *shape)), groups)
        found = estimate(norm.moments(groups, 16))
        assert found is not None
        noises.append(norm.noise)
        roots.append(root)
        norms.append(found.grad_norm_sq)
    assert np.mean(roots) == pytest.approx((1 - low) * truth, rel=0.01)
    assert np.mean(noises) == pytest.approx(truth, rel=left)
    true_norm = np.linalg.svd(mean, compute_uv=False).sum()
    assert math.sqrt(np.mean(norms)) == pytest.approx(true_norm, rel=0.03)


def test_singular_values_where_columns_depend_on_each_other() -> None:
    """Noise of few directions: the plug-in form is 18% low, and more groups are extrapolated to."""
    rng = np.random.default_rng(4)
    rows, columns = np.diag(np.linspace(0.2, 2.0, 32)), np.zeros((16, 48))
    columns[:, :16] = np.eye(16)
    noises, roots = [], []
    for _ in range(30):
        norm, root = spectrum(rows @ rng.normal(size=(16, 32, 16)) @ columns, 4)
        noises.append(norm.noise)
        roots.append(root)
    truth = 4.0 * np.trace(rows)
    assert np.mean(noises) == pytest.approx(truth, rel=0.05)
    assert np.mean(roots) < 0.92 * truth
