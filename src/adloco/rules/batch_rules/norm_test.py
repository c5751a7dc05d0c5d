"""The norm test: a batch for a given relative error of the gradient."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require_choices, require_range
from adloco.rules.batch_rules.batch_rule import (
    Estimator,
    TrainingPoint,
    estimated_norm_sq,
    samples_needed,
)
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class NormTest:
    """Norm test: S / b <= eta^2 |G|^2, so b = ceil(S / (eta^2 |G|^2)).

    b is the batch, G the true gradient and S the trace of the per-sample gradient covariance. With
    B = S / |G|^2, the unbiased form converges to b = B / eta^2. The plug-in form converges to
    B (1 - eta^2) / eta^2, and one test multiplies the batch by at most 1 / eta^2. (One summary of
    the paper prints a square root around the bound; the units and the original condition rule it
    out.)
    """

    key: ClassVar[str] = "norm-test"

    eta: float = 0.8
    """Tolerated relative error of the gradient: the batch follows the noise scale over eta^2. A
    smaller eta takes fewer steps, a larger one fewer samples. Up to 1 the papers' condition for
    convergence holds; 3 to 5 is for budgets in tokens."""
    estimator: Estimator = "unbiased"
    """Estimator of |G|^2. unbiased: corrected for the batch's own noise; plug-in: not corrected, as
    published.
    """

    fewest_groups = 2
    measurement = ""

    def __post_init__(self) -> None:
        require_range(self, "eta", above=0)
        require_choices(self)

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        if estimate is None:
            return point.requested_batch
        norm_sq = estimated_norm_sq(estimate, self.estimator)
        eta = self.eta if point.eta is None else point.eta
        return samples_needed(estimate.grad_variance, eta, norm_sq)
