"""Deviations of the gradients of batches from the full gradient (README.md).

N samples are cut into J batches. Batch j has m_j samples and the mean gradient g_j, and the full
gradient is F = (1 / N) sum_j m_j g_j. The scatter sum_j m_j |g_j - F|^2 has expectation (J - 1) S,
with S the trace of the per-sample covariance, for batches of any sizes. So S^ = scatter / (J - 1)
and |F|^2 - S^ / N estimate S and |G|^2 without bias. Both are sums over parameters, and hold for
any part of the model. Source: McCandlish et al. (arXiv 1812.06162), appendix A.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class BatchGradient:
    """Three numbers of one batch's mean gradient g_j."""

    samples: int
    """m_j."""
    norm_sq: float
    """|g_j|^2."""
    deviation_sq: float
    """|g_j - F|^2."""

    def cosine(self, full_norm_sq: float) -> float:
        """The cosine of g_j with F; nan if one of them is zero.

        Args:
            full_norm_sq: |F|^2.
        """
        return _cosine(self._inner(full_norm_sq), self.norm_sq, full_norm_sq)

    def cosine_with_others(self, full_norm_sq: float, samples: int) -> float:
        """The cosine of g_j with the mean gradient of all samples outside the batch.

        F contains g_j, so their cosine is about sqrt(m_j / N) even if gradients are pure noise. The
        others are independent of g_j, so noise alone has a cosine of about 0 with them.

        Args:
            full_norm_sq: |F|^2.
            samples: N.
        """
        own, inner = self.samples, self._inner(full_norm_sq)
        others = samples - own
        norm_sq = samples**2 * full_norm_sq - 2 * samples * own * inner + own**2 * self.norm_sq
        return _cosine(
            (samples * inner - own * self.norm_sq) / others, self.norm_sq, norm_sq / others**2
        )

    def _inner(self, full_norm_sq: float) -> float:
        """<g_j, F>."""
        return (self.norm_sq + full_norm_sq - self.deviation_sq) / 2


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """The results of two passes over the samples: numbers of each batch and each parameter."""

    batches: Sequence[BatchGradient]
    full_norms_sq: Sequence[float]
    """|F|^2 of each parameter."""
    scatters: Sequence[float]
    """sum_j m_j |g_j - F|^2 of each parameter."""
    loss: float
    """Mean loss over the samples."""

    @property
    def samples(self) -> int:
        """N."""
        return sum(batch.samples for batch in self.batches)

    @property
    def full_norm_sq(self) -> float:
        """|F|^2."""
        return math.fsum(self.full_norms_sq)

    def estimate(self, parameters: Iterable[int] | None = None) -> GradientEstimate:
        """Unbiased estimates of S and |G|^2; `plugin_norm_sq` is |F|^2.

        Args:
            parameters: Indices of the parameters that count; None for all.
        """
        chosen = list(range(len(self.scatters)) if parameters is None else parameters)
        variance = math.fsum(self.scatters[index] for index in chosen) / (len(self.batches) - 1)
        full_norm_sq = math.fsum(self.full_norms_sq[index] for index in chosen)
        return GradientEstimate(
            grad_variance=variance,
            grad_norm_sq=full_norm_sq - variance / self.samples,
            plugin_norm_sq=full_norm_sq,
        )

    def distances(self) -> list[float]:
        """|g_j - F| of each batch."""
        return [math.sqrt(batch.deviation_sq) for batch in self.batches]

    def cosines(self) -> list[float]:
        """The cosine of each batch's gradient with F."""
        norm_sq = self.full_norm_sq
        return [batch.cosine(norm_sq) for batch in self.batches]

    def cosines_with_others(self) -> list[float]:
        """The cosine of each batch's gradient with that of all other batches."""
        norm_sq, samples = self.full_norm_sq, self.samples
        return [batch.cosine_with_others(norm_sq, samples) for batch in self.batches]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread of numbers."""

    mean: float
    median: float
    excess_kurtosis: float
    """0 for a normal distribution, more if rare values lie far out. Unbiased for normal numbers;
    nan for fewer than four numbers or equal ones.
    """

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        """The spread of the finite ones of these numbers; nan if there is none."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return Spread(mean=math.nan, median=math.nan, excess_kurtosis=math.nan)
        return Spread(
            mean=math.fsum(finite) / len(finite),
            median=statistics.median(finite),
            excess_kurtosis=_excess_kurtosis(finite),
        )


def _excess_kurtosis(values: Sequence[float]) -> float:
    """G_2 = (n - 1) / ((n - 2) (n - 3)) ((n + 1) g_2 + 6), with g_2 = m_4 / m_2^2 - 3 from the
    central moments. Source: Joanes and Gill, The Statistician 47 (1998), 183-189.
    """
    count = len(values)
    mean = math.fsum(values) / count
    second, fourth = (math.fsum((x - mean) ** power for x in values) / count for power in (2, 4))
    if count < 4 or second <= (1e-12 * mean) ** 2:  # Equal but for rounding.
        return math.nan
    plain = fourth / second**2 - 3
    return (count - 1) / ((count - 2) * (count - 3)) * ((count + 1) * plain + 6)


def _cosine(inner: float, norm_sq: float, other_norm_sq: float) -> float:
    if norm_sq <= 0 or other_norm_sq <= 0:
        return math.nan
    # Rounding can push the cosine of parallel vectors out of its range.
    return max(-1.0, min(1.0, inner / math.sqrt(norm_sq * other_norm_sq)))
