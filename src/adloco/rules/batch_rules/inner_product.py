"""The inner-product test: a batch for a given error of length along the true gradient."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import (
    Estimator,
    TrainingPoint,
    check_estimator,
    estimated_norm_sq,
    samples_needed,
)
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class InnerProductTest:
    """Inner-product test: Var<g_i, G> / b <= theta^2 |G|^4 (arXiv 1710.11258).

    b is the batch, G the true gradient and g_i the gradient of one sample. Source: Bollapragada,
    Byrd and Nocedal.
    """

    key: ClassVar[str] = "inner-product"

    theta: float = 0.9
    """Tolerated relative error of the gradient's length along the true gradient."""
    estimator: Estimator = "unbiased"
    """How |G|^2 and Var<g_i, G> are estimated. unbiased: needs at least four samples per worker;
    plug-in: from the mean gradient, whose own noise adds S/b to |G|^2 and about tr(Sigma^2)/b to
    Var<g_i, G>."""

    needs_moments = True
    measurement = ""

    def __post_init__(self) -> None:
        require(self.theta > 0, f"theta must be > 0, got {self.theta}")
        check_estimator(self.estimator)

    @property
    def inner_products(self) -> Estimator:
        return self.estimator

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if estimate is None:
            return point.requested_batch
        norm_sq = estimated_norm_sq(estimate, self.estimator)
        return samples_needed(estimate.inner_variance, self.theta, max(norm_sq, 0.0) ** 2)
