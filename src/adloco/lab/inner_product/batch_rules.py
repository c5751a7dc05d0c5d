"""The inner-product test, and the augmented one: batches for a given error of the gradient's length
and of its direction.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from adloco.errors import require_range
from adloco.rules.batch_rules.batch_rule import UNBOUNDED, TrainingPoint
from adloco.rules.batch_rules.norm_test import samples_needed
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class ProductRule:
    """What both tests have in common."""

    theta: float = 0.9
    """Tolerated relative error of the gradient's length along the true gradient."""

    measurement = "adloco.lab.inner_product.product_stats:ProductMeasurement"
    fewest_groups: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_range(self, *(tolerance.name for tolerance in fields(self)), above=0)


@dataclass(frozen=True, kw_only=True)
class InnerProductTest(ProductRule):
    """Inner-product test: Var<g_i, G> / b <= theta^2 |G|^4 (arXiv 1710.11258).

    b is the batch, G the true gradient and g_i the gradient of one sample. Source: Bollapragada,
    Byrd and Nocedal.
    """

    key: ClassVar[str] = "inner-product"

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if estimate is None:
            return point.requested_batch
        return samples_needed(estimate.inner_variance, self.theta, estimate.plugin_norm_sq**2)


@dataclass(frozen=True, kw_only=True)
class AugmentedInnerProductTest(ProductRule):
    """The larger request of the inner-product test and the orthogonality test (arXiv 1710.11258).

    The orthogonality test: Var_orth / b <= nu^2 |G|^2, with b the batch and G the true gradient.
    Var_orth = S - Var<g_i, G> / |G|^2 is the trace, not the mean over coordinates, of the
    per-sample gradients' covariance orthogonal to G.
    """

    key: ClassVar[str] = "augmented"

    nu: float = 5.84
    """Tolerated relative error orthogonal to the true gradient."""

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if estimate is None:
            return point.requested_batch
        norm_sq, inner = estimate.plugin_norm_sq, estimate.inner_variance
        if norm_sq == 0:
            return UNBOUNDED
        along = samples_needed(inner, self.theta, norm_sq**2)
        orthogonal = samples_needed(estimate.grad_variance - inner / norm_sq, self.nu, norm_sq)
        return max(along, orthogonal)
