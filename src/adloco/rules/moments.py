"""What a norm test needs to know about a gradient, in a few numbers per worker (DESIGN section 4).

A worker draws J groups of m_j samples with mean gradients g_j. From |g_j|^2 and the |gbar|^2 of their mean alone follows an unbiased
estimate of S, the trace of the per-sample gradient covariance, for any sizes of the groups. Several workers that stand at the same point are
pooled by adding these numbers; no vector is exchanged. Source: AdLoCo (arXiv 2508.18182) section 3, McCandlish et al. (arXiv 1812.06162) appendix A.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Sums over workers of the sufficient statistics of their gradients. Moments add; one worker's are `group_moments`."""

    scatter: float = 0.0
    """sum_j m_j |g_j|^2 - b |gbar|^2; its expectation is dof * S."""
    dof: float = 0.0
    """Degrees of freedom: groups minus one."""
    mean_norm_sq: float = 0.0
    """|gbar|^2, the squared norm of the worker's mean gradient."""
    inverse_samples: float = 0.0
    """1 / b, with b the samples behind gbar."""
    inner_scatter: float = 0.0
    """sum_j m_j (<g_j, gbar> - |gbar|^2)^2; its expectation is about dof * Var<g_i, G>. Zero unless inner products were taken."""
    workers: float = 0.0
    """How many workers are in these sums."""

    def __add__(self, other: "Moments") -> "Moments":
        return Moments.from_numbers(mine + theirs for mine, theirs in zip(self.to_numbers(), other.to_numbers(), strict=True))

    def to_numbers(self) -> list[float]:
        """The float64 scalars that cross the network."""
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def from_numbers(numbers: Iterable[float]) -> "Moments":
        return Moments(**{field.name: number for field, number in zip(fields(Moments), numbers, strict=True)})


def group_moments(
    group_samples: Sequence[int],
    group_norms_sq: Sequence[float],
    mean_norm_sq: float,
    inner_products: Sequence[float] = (),
) -> Moments:
    """Moments of one worker from its groups.

    group_samples: m_j, the samples in each group. group_norms_sq: |g_j|^2 of each group's *mean* gradient. mean_norm_sq: |gbar|^2 of the
    mean over all samples. inner_products: <g_j, gbar>, only for the inner-product tests.
    """
    samples = sum(group_samples)
    weighted = sum(m * norm for m, norm in zip(group_samples, group_norms_sq, strict=True))
    return Moments(
        # Rounding can push the scatter of equal gradients just below zero, which no scatter is.
        scatter=max(0.0, weighted - samples * mean_norm_sq),
        dof=len(group_samples) - 1,
        mean_norm_sq=mean_norm_sq,
        inverse_samples=1 / samples,
        inner_scatter=sum(m * (inner - mean_norm_sq) ** 2 for m, inner in zip(group_samples, inner_products, strict=False)),
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
    """Var<g_i, G> over samples, from the inner-product tests; in units of |G|^4."""

    @property
    def noise_scale(self) -> float:
        """B = S / |G|^2 in samples (the simple noise scale); infinite where the estimate of |G|^2 is not positive."""
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
