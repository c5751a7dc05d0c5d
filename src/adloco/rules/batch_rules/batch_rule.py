"""What a batch rule is: from one smoothed estimate of the gradient's statistics to a number of
samples, without memory (DESIGN section 4; AdLoCo section 3, arXiv 2508.18182).

The memory (smoothing, growth limits, what the trainer asks for now) is in `controller.py`.
"""

import math
from typing import Literal, Protocol

from adloco.errors import require
from adloco.rules.moments import GradientEstimate

UNBOUNDED = 2**40
"""A request that no machine serves: what a rule asks for when the estimated |G|^2 is not positive.
"""

Estimator = Literal["unbiased", "plug-in"]


class BatchRule(Protocol):
    """Decides a trainer's batch. `requested` is pure: the same numbers give the same answer on
    every rank.
    """

    @property
    def needs_moments(self) -> bool:
        """Whether workers must take gradient statistics for this rule."""
        ...

    @property
    def inner_products(self) -> Estimator | None:
        """How those statistics estimate Var<g_i, G>; None if this rule does not need it.

        Costs a second pass over the test step's samples, and copies of the gradient: one for the
        plug-in form, two for the unbiased one, which takes at least four groups.
        """
        ...

    def requested(
        self, estimate: GradientEstimate | None, trainer_samples: int, current: int
    ) -> int:
        """Samples per inner step over all workers of the trainer.

        estimate: smoothed statistics, None if none were taken. trainer_samples: what the trainer
        has seen so far. current: what it asks for now.
        """
        ...


def groups_to_compare(rule: BatchRule) -> int:
    """The fewest groups of samples from which a worker's statistics say what the rule needs."""
    if rule.inner_products == "unbiased":
        return 4
    return 2 if rule.needs_moments else 1


def samples_needed(variance: float, tolerance: float, norm: float) -> int:
    """ceil(variance / (tolerance^2 norm)): the smallest b with variance / b <= tolerance^2 norm."""
    if variance <= 0:
        return 1
    allowed = tolerance**2 * norm
    return max(1, math.ceil(min(variance / allowed, UNBOUNDED))) if allowed > 0 else UNBOUNDED


def check_estimator(estimator: str) -> None:
    require(
        estimator in ("unbiased", "plug-in"),
        f"estimator must be unbiased or plug-in, got {estimator!r}",
    )


def estimated_norm_sq(estimate: GradientEstimate, estimator: Estimator) -> float:
    return estimate.grad_norm_sq if estimator == "unbiased" else estimate.plugin_norm_sq
