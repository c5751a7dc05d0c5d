"""The norm test: a batch large enough for a given relative error of the gradient."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import (
    Estimator,
    check_estimator,
    estimated_norm_sq,
    samples_needed,
)
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class NormTest:
    """Norm test: S / b <= eta^2 |G|^2, so b = ceil(S / (eta^2 |G|^2)).

    Applied at every test, the plug-in form grows by at most 1/eta^2 and settles at B (1 - eta^2) /
    eta^2; the unbiased form settles at B / eta^2 with B = S / |G|^2. (One summary of the paper
    prints a square root around the bound; its dimensions and the original condition exclude it.)
    """

    key: ClassVar[str] = "norm-test"

    eta: float = 0.8
    """Tolerated relative error of the gradient; smaller asks for more samples."""
    estimator: Estimator = "unbiased"
    """How |G|^2 is estimated: unbiased, or plug-in (as published, without the correction for the
    batch's own noise).
    """

    needs_moments = True
    inner_products = None

    def __post_init__(self) -> None:
        require(self.eta > 0, f"eta must be > 0, got {self.eta}")
        check_estimator(self.estimator)

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        return (
            current
            if estimate is None
            else samples_needed(
                estimate.grad_variance, self.eta, estimated_norm_sq(estimate, self.estimator)
            )
        )
