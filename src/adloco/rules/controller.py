"""A trainer's requested batch over time (docs/method.md).

After the tests of a round, S and |G|^2 are each followed by a filter (`level.py`): a normal
distribution of the logarithm, which widens with the logarithm of the samples seen, and which each
test multiplies by its likelihood. With the medians a batch rule is asked for a batch, and guards
limit the answer.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from adloco.errors import require_range, require_setting
from adloco.rules.batch_rules.batch_rule import BatchRule, TrainingPoint
from adloco.rules.level import Level, merged
from adloco.rules.moments import GradientEstimate
from adloco.setting import setting

MOST_SAMPLES = 1 << 24
"""Largest limit on a batch, in samples: an inner step lists its micro-batches."""

NORM_WANDER = 1.5
"""Variance that the logarithm of |G|^2 gains as the samples seen grow e-fold. A tenth more samples
change |G|^2 by a factor of 1.5, up or down (one standard deviation). Of 0.7, 1.5 and 3, this value
had the smallest mean error over three recipes, 0.7 nearly the same (reproduce/LOG.md)."""
NORM_FALL = 0.5
"""|G|^2 falls about as one over the root of the samples in all runs that were measured."""
VARIANCE_WANDER = 1.0
"""Same as `NORM_WANDER`, for S, which changes more slowly."""
MERGE_WANDER = 1.0
"""Variance that a merge adds to the logarithms: it averages models, whose gradient is another."""
NORM_NOISE = 0.02
"""Variance of a test's |G|^2 over |gbar|^4 until it has been measured. With 2 J / ((J - 1) r), J
groups and an effective rank r of the covariance: 0.01 with J = 4 in models of a million parameters;
twice that, because norms of samples have heavier tails than normal ones.
"""
VARIANCE_NOISE = 0.5
"""Variance of a test's S over S^2 until it has been measured."""


@dataclass(frozen=True, kw_only=True)
class BatchGuards:
    """Limits on what a batch rule may request.

    The defaults of `max_growth` and `hysteresis` switch these two off.
    """

    initial: int = setting(8, aliases=("batch", "batch_size"))
    """Requested batch at the start, in samples per inner step over all workers of a trainer. A rule
    with a schedule (ramp; warmup if its first stage begins at 0 samples) replaces it by its own
    first batch."""
    minimum: int = 1
    """Smallest requested batch, in samples."""
    maximum: int = 512
    """Largest requested batch, in samples. A trainer with many workers can train on more, because
    every worker takes at least one sample (two for rules that test gradients), and every rank of a
    worker at least one."""
    max_growth: float = math.inf
    """Largest factor by which one round may raise the requested batch; by one sample it always
    may. While |G|^2 cannot be told from zero the batch grows by this factor; with inf, which is no
    limit, to the maximum."""
    hysteresis: float = 0.0
    """Relative change that a rule must ask for, within minimum and maximum; for less, the requested
    batch stays unchanged."""
    grow_only: bool = False
    """True: no rule lowers the requested batch, as published; false: it may fall too. The mean of
    merge.requested_batch = weighted may be lower all the same."""

    def __post_init__(self) -> None:
        require_range(self, "initial", above=0)
        require_setting(
            0 < self.minimum <= self.initial, self, "minimum", "must be > 0 and <= {initial=}"
        )
        require_setting(self.maximum >= self.initial, self, "maximum", "must be >= {initial=}")
        require_range(self, "maximum", at_most=MOST_SAMPLES)
        require_range(self, "max_growth", above=1)
        require_range(self, "hysteresis", at_least=0, at_most=1)

    def limit(self, wanted: int, current: int) -> int:
        """The new requested batch, from what the rule wants and the current one, in samples."""
        allowed = max(self.minimum, min(wanted, self.maximum))
        # Before growth is limited: what one round may add can be less than this for ever.
        if abs(allowed - current) < self.hysteresis * current:
            return current
        # At least one sample more is allowed, because otherwise a small request could never grow.
        grown = max(current + 1, math.floor(min(current * self.max_growth, self.maximum)))
        limited = max(self.minimum, min(allowed, grown))
        return max(limited, current) if self.grow_only else limited


class BatchController:
    """Keeps one trainer's requested batch and updates it after each test."""

    def __init__(self, rule: BatchRule, guards: BatchGuards) -> None:
        self.rule = rule
        self.guards = guards
        self.requested_batch = guards.initial
        self.measured: GradientEstimate | None = None
        """Measurements of the last tests."""
        if rule.fewest_groups == 1:  # Its schedule begins with the first round.
            first = self._requested(0, decay=1.0)
            self.requested_batch = max(guards.minimum, min(first, guards.maximum))
        self._samples = 0
        self._variance = Level(log_mean=None, log_variance=0.0, test_variance=VARIANCE_NOISE)
        self._norm = Level(log_mean=None, log_variance=0.0, test_variance=NORM_NOISE)

    def update(
        self, measured: GradientEstimate | None, trainer_samples: int, decay: float = 1.0
    ) -> None:
        """Set the new requested batch.

        Args:
            measured: The statistics of this round's tests; None if none were taken. A rule that
                needs them then leaves the request unchanged.
            trainer_samples: Samples that the trainer has trained on so far. The more they have
                grown since the last tests, the less these count.
            decay: What the decay of the learning rate has left of it; see `TrainingPoint`.
        """
        if measured is None and self.rule.fewest_groups > 1:
            return
        if measured is not None:
            self._follow(measured, trainer_samples)
        wanted = self._requested(trainer_samples, decay)
        self.requested_batch = self.guards.limit(wanted, self.requested_batch)

    def _requested(self, samples: int, decay: float) -> int:
        """The batch that the rule asks for."""
        point = TrainingPoint(
            samples=samples,
            requested_batch=self.requested_batch,
            initial_batch=self.guards.initial,
            decay=decay,
        )
        wanted = self.rule.requested(self.estimate, point)
        try:
            return operator.index(wanted)  # NumPy's whole numbers too.
        except TypeError:
            raise ValueError(
                f"batch.rule must request a whole number of samples, got {wanted!r} from "
                f"{type(self.rule).__name__}"
            ) from None

    @property
    def estimate(self) -> GradientEstimate | None:
        """The estimate of the gradient's statistics from all tests; None before the first."""
        if self.measured is None:
            return None
        variance, norm_sq, last = self._variance.value, self._norm.value, self.measured
        # Plug-in forms are the published ones: ratios that the last tests alone measured.
        scale = variance / last.grad_variance if last.grad_variance > 0 else 1.0
        return replace(
            last,
            grad_variance=variance,
            grad_norm_sq=norm_sq,
            plugin_norm_sq=last.plugin_norm_sq * scale,
            inner_variance=last.inner_variance * scale**2,
            norm_factor=self._norm.factor,
            variance_factor=self._variance.factor,
        )

    def merge(self, members: Mapping[int, "BatchController"], weights: Mapping[int, float]) -> None:
        """Take over what all trainers of a merge know of the gradient's statistics.

        members: Controllers of the merged trainers, this one included, by trainer id.
        """
        tested = {key: each for key, each in members.items() if each.measured is not None}
        if not tested:
            return
        self.measured = self.measured or next(iter(tested.values())).measured
        for name in ("_variance", "_norm"):
            levels = {key: getattr(each, name) for key, each in tested.items()}
            setattr(self, name, merged(levels, weights, MERGE_WANDER))

    def _follow(self, measured: GradientEstimate, samples: int) -> None:
        elapsed = math.log(samples / self._samples) if samples > self._samples > 0 else 0.0
        self.measured, self._samples = measured, samples
        variance, mean_sq, tests = measured.grad_variance, measured.plugin_norm_sq, measured.tests
        self._variance = self._variance.later(elapsed, wander=VARIANCE_WANDER).seen_positive(
            variance, spread=measured.variance_spread, tests=tests
        )
        self._norm = self._norm.later(elapsed, wander=NORM_WANDER, fall=NORM_FALL).seen(
            measured.grad_norm_sq, scale=mean_sq, spread=measured.norm_spread, tests=tests
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "requested_batch": self.requested_batch,
            "samples": self._samples,
            "measured": asdict(self.measured) if self.measured else None,
            "variance": asdict(self._variance),
            "norm": asdict(self._norm),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.requested_batch = state["requested_batch"]
        self._samples = state["samples"]
        measured = state["measured"]
        self.measured = GradientEstimate(**measured) if measured else None
        self._variance = Level(**state["variance"])
        self._norm = Level(**state["norm"])
