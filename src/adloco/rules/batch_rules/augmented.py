"""The augmented inner-product test: a batch for a given error of length and direction."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import (
    UNBOUNDED,
    Estimator,
    TrainingPoint,
    check_estimator,
    estimated_norm_sq,
    samples_needed,
)
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class AugmentedInnerProductTest:
    """The larger request of the inner-product test and the orthogonality test (arXiv 1710.11258).

    The orthogonality test: Var_orth / b <= nu^2 |G|^2, with b the batch and G the true gradient.
    Var_orth = S - Var<g_i, G> / |G|^2 is the trace, not the mean over coordinates, of the
    per-sample gradients' covariance orthogonal to G.
    """

    key: ClassVar[str] = "augmented"

    theta: float = 0.9
    """Tolerated relative error along the true gradient."""
    nu: float = 5.84
    """Tolerated relative error orthogonal to the true gradient."""
    estimator: Estimator = "unbiased"
    """How |G|^2 and Var<g_i, G> are estimated. unbiased: needs at least four samples per worker;
    plug-in: from the mean gradient, whose own noise adds S/b to |G|^2 and about tr(Sigma^2)/b to
    Var<g_i, G>."""

    needs_moments = True
    measurement = ""

    def __post_init__(self) -> None:
        require(self.theta > 0, f"theta must be > 0, got {self.theta}")
        require(self.nu > 0, f"nu must be > 0, got {self.nu}")
        check_estimator(self.estimator)

    @property
    def inner_products(self) -> Estimator:
        return self.estimator

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if estimate is None:
            return point.requested_batch
        norm_sq = max(estimated_norm_sq(estimate, self.estimator), 0.0)
        if norm_sq == 0:
            return UNBOUNDED
        along = samples_needed(estimate.inner_variance, self.theta, norm_sq**2)
        orthogonal = samples_needed(
            estimate.grad_variance - estimate.inner_variance / norm_sq, self.nu, norm_sq
        )
        return max(along, orthogonal)
