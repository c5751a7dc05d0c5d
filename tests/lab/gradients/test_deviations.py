"""Deviations of batch gradients: hand arithmetic, expectations by enumeration, NumPy."""

import itertools
import math

import numpy as np
import pytest

from adloco.lab.gradients.deviations import BatchGradient, Deviations, Spread


def deviations(sizes: list[int], gradients: np.ndarray) -> Deviations:
    """From per-sample gradients [samples, parameters], in batches of these sizes."""
    full = gradients.mean(0)
    edges = np.cumsum([0, *sizes])
    means = [gradients[a:b].mean(0) for a, b in itertools.pairwise(edges)]
    return Deviations(
        batches=[
            BatchGradient(
                samples=size,
                norm_sq=float(mean @ mean),
                deviation_sq=float((mean - full) @ (mean - full)),
            )
            for size, mean in zip(sizes, means, strict=True)
        ],
        full_norms_sq=(full**2).tolist(),
        scatters=sum(
            size * (mean - full) ** 2 for size, mean in zip(sizes, means, strict=True)
        ).tolist(),
        loss=0.0,
    )


def test_by_hand() -> None:
    """Gradients (0, 0), (2, 0) and (4, 3): batches of the first two, g = (1, 0), and of the third,
    g = (4, 3). F = (2, 1).
    """
    found = deviations([2, 1], np.array([[0.0, 0], [2, 0], [4, 3]]))
    assert (found.samples, found.full_norm_sq) == (3, 5)
    # 2 |(-1, -1)|^2 + 1 |(2, 2)|^2 = 12, with one degree of freedom; 5 - 12 / 3 = 1.
    whole = found.estimate()
    assert (whole.grad_variance, whole.grad_norm_sq, whole.noise_scale) == (12, 1, 12)
    # Of the second coordinate alone: 2 * 1 + 1 * 4 = 6; 1 - 6 / 3 = -1, which is unbiased noise.
    part = found.estimate([1])
    assert (part.grad_variance, part.grad_norm_sq, part.noise_scale) == (6, -1, math.inf)
    assert found.distances() == [math.sqrt(2), math.sqrt(8)]
    assert found.cosines() == pytest.approx([2 / math.sqrt(5), 11 / (5 * math.sqrt(5))])
    # Two batches: each one's others are the other one, and <(1, 0), (4, 3)> = 4.
    assert found.cosines_with_others() == pytest.approx([4 / 5, 4 / 5])


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 1, 1], [3, 1]])
@pytest.mark.parametrize("replaced", [True, False])
def test_the_estimates_are_unbiased(sizes: list[int], replaced: bool) -> None:
    """The mean over all equally likely draws of four samples is the truth.

    Draws with replacement are a distribution of infinitely many samples. Draws without it are an
    epoch of six: S has the divisor N - 1, and |G|^2 is what an infinite supply of such would have.
    """
    truth = np.array([[1.0, 0], [-2, 5], [0, 3], [7, 1], [1, 1], [0, -4]])
    draws = (
        itertools.product(range(6), repeat=4) if replaced else itertools.permutations(range(6), 4)
    )
    seen = [deviations(sizes, truth[list(draw)]).estimate() for draw in draws]
    variance = truth.var(0, ddof=0 if replaced else 1).sum()
    norm_sq = (truth.mean(0) ** 2).sum() - (0 if replaced else variance / 6)
    assert np.mean([each.grad_variance for each in seen]) == pytest.approx(variance)
    assert np.mean([each.grad_norm_sq for each in seen]) == pytest.approx(norm_sq)


def test_cosines_of_random_gradients() -> None:
    gradients = np.random.default_rng(0).standard_normal((12, 5)) + 0.5
    sizes = [5, 4, 3]
    found, edges = deviations(sizes, gradients), np.cumsum([0, *sizes])
    for batch, (begin, end) in enumerate(itertools.pairwise(edges)):
        mean, full = gradients[begin:end].mean(0), gradients.mean(0)
        others = np.delete(gradients, range(begin, end), axis=0).mean(0)
        for cosine, other in ((found.cosines(), full), (found.cosines_with_others(), others)):
            expected = mean @ other / np.linalg.norm(mean) / np.linalg.norm(other)
            assert cosine[batch] == pytest.approx(expected, rel=1e-9)


def test_a_zero_gradient_has_no_cosine() -> None:
    found = deviations([1, 1], np.array([[1.0], [-1.0]]))
    assert found.full_norm_sq == 0
    assert all(math.isnan(cosine) for cosine in found.cosines())
    assert found.cosines_with_others() == [-1, -1]


@pytest.mark.parametrize(
    ("values", "mean", "median", "kurtosis"),
    [
        # KURT of spreadsheets has this definition, and its manuals these values.
        ([1, 2, 3, 4], 2.5, 2.5, -1.2),
        ([0, 0, 0, 1], 0.25, 0, 4),
        ([3, 4, 5, 2, 3, 4, 5, 6, 4, 7], 4.3, 4, -0.1517996),
        ([1, 2, math.nan, 3, 4], 2.5, 2.5, -1.2),
        ([5, 5, 5, 5], 5, 5, math.nan),
        ([1, 3], 2, 2, math.nan),
        ([], math.nan, math.nan, math.nan),
    ],
)
def test_spread(values: list[float], mean: float, median: float, kurtosis: float) -> None:
    spread = Spread.of(values)
    found = (spread.mean, spread.median, spread.excess_kurtosis)
    assert found == pytest.approx((mean, median, kurtosis), nan_ok=True)
