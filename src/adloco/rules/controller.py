"""What a trainer asks for over time: smoothing of the statistics, a batch rule, and the guards
around its answer (DESIGN section 4).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class BatchGuards:
    """Limits around a batch rule. Every limit is explicit; the defaults of `max_growth` and
    `hysteresis` switch these off.
    """

    initial: int = 8
    """Requested batch at the start: samples per inner step over all workers of a trainer."""
    minimum: int = 1
    """Smallest requested batch, in samples."""
    maximum: int = 512
    """Largest requested batch, in samples. What is trained can be more: each worker takes at least
    one sample (two for the norm test, four for unbiased inner-product tests), also after a merge
    has given a trainer many workers, and so does each of its ranks."""
    max_growth: float = math.inf
    """Largest factor by which one test may raise the request."""
    hysteresis: float = 0.0
    """Relative change below which the request stays as it is."""
    smoothing: float = 0.0
    """Weight of the past in the moving averages of S and |G|^2 (smoothed separately, then divided);
    0 uses the last test alone.
    """
    grow_only: bool = False
    """Whether the request may only rise, as published, or also fall."""

    def __post_init__(self) -> None:
        require(self.initial > 0, f"initial must be > 0, got {self.initial}")
        require(
            0 < self.minimum <= self.initial,
            f"minimum must be > 0 and <= initial = {self.initial}, got {self.minimum}",
        )
        require(
            self.maximum >= self.initial,
            f"maximum must be >= initial = {self.initial}, got {self.maximum}",
        )
        require(self.max_growth > 1, f"max_growth must be > 1, got {self.max_growth}")
        most = self.max_growth - 1
        require(
            0 <= self.hysteresis <= most,
            f"hysteresis must be >= 0 and <= max_growth - 1 = {most}, got {self.hysteresis}",
        )
        require(0 <= self.smoothing < 1, f"smoothing must be in [0, 1), got {self.smoothing}")

    def limit(self, wanted: int, current: int) -> int:
        """The request after a rule asked for `wanted` while `current` was in force."""
        # At least one sample more, or a small request could never grow.
        grown = max(current + 1, math.floor(min(current * self.max_growth, self.maximum)))
        limited = max(self.minimum, min(wanted, grown, self.maximum))
        if self.grow_only:
            limited = max(limited, current)
        return current if abs(limited - current) < self.hysteresis * current else limited


class BatchController:
    """The request of one trainer, updated by each test."""

    def __init__(self, rule: BatchRule, guards: BatchGuards) -> None:
        self.rule = rule
        self.guards = guards
        self.requested_batch = guards.initial
        self.estimate: GradientEstimate | None = None
        self._weight = 0.0
        self._sums = GradientEstimate(grad_variance=0.0, grad_norm_sq=0.0, plugin_norm_sq=0.0)

    def update(self, measured: GradientEstimate | None, trainer_samples: int) -> None:
        """Take in one test (None where there was none) and set the new request; without a test, a
        rule that needs one leaves it as it is.
        """
        if measured is None and self.rule.needs_moments:
            return
        if measured is not None:
            self._smooth(measured)
        wanted = self.rule.requested(self.estimate, trainer_samples, self.requested_batch)
        self.requested_batch = self.guards.limit(wanted, self.requested_batch)

    def _smooth(self, measured: GradientEstimate) -> None:
        # Sums of weight 1, s, s^2, ... divided by the weight so far: the average starts unbiased,
        # as in Adam's correction.
        past = self.guards.smoothing
        self._weight = past * self._weight + 1
        self._sums = GradientEstimate(
            **{
                key: past * value + asdict(measured)[key]
                for key, value in asdict(self._sums).items()
            }
        )
        self.estimate = GradientEstimate(
            **{key: value / self._weight for key, value in asdict(self._sums).items()}
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "requested_batch": self.requested_batch,
            "weight": self._weight,
            "sums": asdict(self._sums),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.requested_batch = state["requested_batch"]
        self._weight = state["weight"]
        self._sums = GradientEstimate(**state["sums"])
        if self._weight > 0:
            self.estimate = GradientEstimate(
                **{key: value / self._weight for key, value in state["sums"].items()}
            )
