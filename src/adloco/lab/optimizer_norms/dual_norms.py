"""Gradient statistics in the norm that belongs to an optimizer's steps (arXiv 2602.03001).

A step of length r in a norm lowers the loss by at most r |G|_*, to first order, where |G|_* is the
dual norm of the gradient G; with the gradient g of a batch of b samples it loses at most
2 r |g - G|_* of that. The dual norm of steps by signs (length: the largest element) is the sum of
absolute values, and that of Muon's steps (length: the largest singular value) is the sum of
singular values, |G|_S1. By Jensen's inequality

    E|g - G|_* <= N / sqrt(b)     N = sum_i sigma_i for signs, tr C^(1/2) for a matrix

with sigma_i the standard deviation of element i over samples, and C = E[(g_i - G)(g_i - G)'] over
samples. So the norm test E|g - G|_* <= eta |G|_* asks for b = N^2 / (eta^2 |G|_*^2): S = N^2 and
|G|^2 = |G|_*^2 take the places that they have in the Euclidean test.

A matrix and its transpose have the same singular values, so C may have the size of either side.
Here it has that of the shorter one, which gives the smaller bound if the noise of all elements is
alike (by the root of the ratio of the sides), and needs fewer samples.

**Several parts.** If part p of the parameters is stepped by a length r_p in its own norm, the whole
step has length 1 in the norm max_p |x_p| / r_p. Its dual is sum_p r_p |G_p|_*, so noise and
gradient are summed over the parts, each times its step's length, before they are divided.
"""

import math
from dataclasses import dataclass

from adloco.rules.moments import Moments


@dataclass(frozen=True, kw_only=True)
class DualNorms:
    """Dual norms of a worker's gradients on a test step, of a part of the parameters or of all."""

    noise: float
    """N: sum_i sigma_i, or tr C^(1/2)."""
    mean: float
    """|gbar|_*, with gbar the mean gradient of the worker's samples."""
    mean_noise: float
    """Expected |gbar|_* if G were zero."""

    def __add__(self, other: "DualNorms") -> "DualNorms":
        return DualNorms(
            noise=self.noise + other.noise,
            mean=self.mean + other.mean,
            mean_noise=self.mean_noise + other.mean_noise,
        )

    def times(self, length: float) -> "DualNorms":
        """The norms of a part whose step has this length."""
        return DualNorms(
            noise=length * self.noise,
            mean=length * self.mean,
            mean_noise=length * self.mean_noise,
        )

    def moments(self, groups: int, samples: int) -> Moments:
        """The worker's moments, in which S is N^2 and |G|^2 is |G|_*^2.

        |gbar|_*^2 is too large by `mean_noise`^2 if signal and noise are alike: if the elements (or
        the singular values) of G are spread as those of the noise are. Otherwise the estimate of
        |G|_* has a bias, however many steps are averaged. If all elements have one signal-to-noise
        ratio, it is up to 20% too small, the more so the smaller the ratio; if few elements have
        all the signal, it is too large, the more so the more noise the others have. Without the
        correction it is too large in all cases: several times where the noise of an element
        exceeds its mean, as in large models.

        Args:
            groups: J, the number of groups of samples; at least 2.
            samples: b, the samples of the step.
        """
        return Moments.of_step(
            samples=samples,
            dof=groups - 1,
            variance=self.noise**2,
            norm_sq=self.mean**2 - self.mean_noise**2,
            mean_norm_sq=self.mean**2,
        )


def by_elements(deviations: float, mean: float, *, groups: int, samples: int) -> DualNorms:
    """Dual norms of elements that are stepped by their signs.

    The root of a sample variance is too small on average. For groups whose mean gradients are
    normal it is c4(J) times the standard deviation (0.80 for J = 2, 0.92 for 4, 0.96 for 8), by
    which it is divided here. Elements that few samples touch, as in embeddings of rare tokens, are
    not normal, and their deviation stays too small.

    Args:
        deviations: sum_i of the root of the unbiased sample variance of element i.
        mean: sum_i |gbar_i|.
        groups: J, the number of groups of samples.
        samples: b, all samples.
    """
    noise = deviations / c4(groups)
    # E|x| of a normal x with deviation sigma / sqrt(b) is sqrt(2 / pi) of that.
    return DualNorms(noise=noise, mean=mean, mean_noise=noise * math.sqrt(2 / (math.pi * samples)))


def by_singular_values(
    root_trace: float, mean: float, contrast: float, *, groups: int, samples: int
) -> DualNorms:
    """Dual norms of a matrix that is stepped by its singular vectors.

    tr C^(1/2) of a sample covariance is too small on average, in proportion to 1 / (J - 1) to first
    order, as there are J - 1 independent differences of groups. The contrast alone is one
    difference, so its tr C^(1/2) has J - 1 times that bias, which gives the limit of many groups.
    For a square matrix of independent elements the sample covariance is 4% low with J = 4, and the
    extrapolation 1% high. With J = 2 there is nothing to extrapolate from: 15% low.

    Args:
        root_trace: tr C^(1/2) of the unbiased sample covariance of the groups.
        mean: |gbar|_S1.
        contrast: |d|_S1 of a matrix d with the noise of gbar and no signal: the difference of two
            halves of the groups, times a factor.
        groups: J, the number of groups of samples.
        samples: b, all samples.
    """
    single = contrast * math.sqrt(samples)
    more = (root_trace - single) / (groups - 2) if groups > 2 else 0.0
    return DualNorms(noise=root_trace + more, mean=mean, mean_noise=contrast)


def c4(count: int) -> float:
    """E[s] / sigma for the sample standard deviation s of `count` normal numbers."""
    half = (count - 1) / 2
    return math.exp(math.lgamma(half + 0.5) - math.lgamma(half)) / math.sqrt(half)
