"""The norm test: a batch for a given relative error of the gradient."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from adloco.errors import require_choices, require_range
from adloco.rules.batch_rules.batch_rule import UNBOUNDED, TrainingPoint
from adloco.rules.moments import GradientEstimate

UNKNOWN = 3.0
"""|G|^2 cannot be told from zero if it is known to within this factor only, up or down. Noise then
dominates at the batch of the tests, and a larger batch is asked for until it does not."""

Estimator = Literal["unbiased", "plug-in"]
"""Estimator of the true gradient's statistics; see `GradientEstimate`."""


@dataclass(frozen=True, kw_only=True)
class NormTest:
    """Norm test: S / b <= eta^2 |G|^2, so b = ceil(S / (eta^2 |G|^2)).

    b is the batch, G the true gradient and S the trace of the per-sample gradient covariance. With
    B = S / |G|^2, the unbiased form converges to b = B / eta^2. The plug-in form converges to
    B (1 - eta^2) / eta^2, and in expectation one test multiplies the batch by at most 1 / eta^2.
    (One summary of the paper prints a square root around the bound; the units and the original
    condition rule it out.)

    On the test steps of a round (by default its first `test.steps`) a worker cuts its batch into
    `test.groups` groups and `algorithms/gradient_stats.py` measures their gradients' norms,
    `rules/moments.py` makes S and |G|^2 of them, `Trainer.update_batch` pools the workers, and
    `BatchController` filters the estimate, asks this rule, and limits the answer.
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
        norm_sq = estimate.plugin_norm_sq
        if self.estimator == "unbiased":  # 0 if it cannot be told from zero.
            norm_sq = estimate.grad_norm_sq if estimate.norm_factor <= UNKNOWN else 0.0
        return samples_needed(estimate.grad_variance, self.eta, norm_sq)


def samples_needed(variance: float, tolerance: float, norm: float) -> int:
    """The smallest batch b >= 1 with variance / b <= tolerance^2 norm; at most UNBOUNDED.

    `norm` is the power of |G| that has the unit of the variance: |G|^2 or |G|^4.
    """
    if variance <= 0:
        return 1
    allowed = tolerance**2 * norm
    return max(1, math.ceil(min(variance / allowed, UNBOUNDED))) if allowed > 0 else UNBOUNDED
