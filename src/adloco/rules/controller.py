"""A trainer's requested batch over time (docs/method.md).

Each test smooths the gradient statistics, asks a batch rule for a batch, and limits the answer by
guards.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import BatchRule, TrainingPoint
from adloco.rules.moments import GradientEstimate

MOST_SAMPLES = 1 << 24
"""Largest limit on a batch, in samples: an inner step lists its micro-batches."""


@dataclass(frozen=True, kw_only=True)
class BatchGuards:
    """Limits on what a batch rule may request.

    The defaults of `max_growth` and `hysteresis` switch these two off.
    """

    initial: int = 8
    """Requested batch at the start, in samples per inner step over all workers of a trainer."""
    minimum: int = 1
    """Smallest requested batch, in samples."""
    maximum: int = 512
    """Largest requested batch, in samples. A trainer with many workers can train on more, because
    every worker takes at least one sample (two for the norm test, four for unbiased inner-product
    tests), and every rank of a worker at least one."""
    max_growth: float = math.inf
    """Largest factor by which one test may raise the requested batch."""
    hysteresis: float = 0.0
    """Relative change below which the requested batch stays unchanged."""
    smoothing: float = 0.0
    """Weight of the past in the moving averages of the gradient variance S and of |G|^2, which are
    smoothed separately and then divided; 0 uses the last test alone.
    """
    grow_only: bool = False
    """True: the requested batch never falls, as published; false: it may fall too."""

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
        require(
            self.maximum <= MOST_SAMPLES,
            f"maximum must be <= {MOST_SAMPLES:,}, got {self.maximum:,}",
        )
        require(self.max_growth > 1, f"max_growth must be > 1, got {self.max_growth}")
        most = self.max_growth - 1
        require(
            0 <= self.hysteresis <= most,
            f"hysteresis must be >= 0 and <= max_growth - 1 = {most}, got {self.hysteresis}",
        )
        require(0 <= self.smoothing < 1, f"smoothing must be in [0, 1), got {self.smoothing}")

    def limit(self, wanted: int, current: int) -> int:
        """The new requested batch, from what the rule wants and the current one, in samples."""
        # At least one sample more is allowed, because otherwise a small request could never grow.
        grown = max(current + 1, math.floor(min(current * self.max_growth, self.maximum)))
        limited = max(self.minimum, min(wanted, grown, self.maximum))
        if self.grow_only:
            limited = max(limited, current)
        return current if abs(limited - current) < self.hysteresis * current else limited


class BatchController:
    """Keeps one trainer's requested batch and updates it after each test.

    Args:
        rule: Decides the batch.
        guards: Limit what the rule decides.
        seed: Seed of the run, for rules that draw random numbers.
    """

    def __init__(self, rule: BatchRule, guards: BatchGuards, seed: int = 0) -> None:
        self.rule = rule
        self.guards = guards
        self.seed = seed
        self.requested_batch = guards.initial
        self.estimate: GradientEstimate | None = None
        self._weight = 0.0
        self._sums = GradientEstimate(grad_variance=0.0, grad_norm_sq=0.0, plugin_norm_sq=0.0)

    def update(
        self,
        measured: GradientEstimate | None,
        trainer_samples: int,
        decay: float = 1.0,
        eta: float | None = None,
    ) -> None:
        """Set the new requested batch.

        Args:
            measured: The statistics of this round's test; None if none were taken. A rule that
                needs them then leaves the request unchanged.
            trainer_samples: Samples that the trainer has trained on so far.
            decay: What the decay of the learning rate has left of it; see `TrainingPoint`.
            eta: eta in force of a run that chooses it; see `TrainingPoint`.
        """
        if measured is None and self.rule.needs_moments:
            return
        if measured is not None:
            self._smooth(measured)
        point = TrainingPoint(
            samples=trainer_samples,
            requested_batch=self.requested_batch,
            initial_batch=self.guards.initial,
            decay=decay,
            seed=self.seed,
            eta=eta,
        )
        wanted = self.rule.requested(self.estimate, point)
        self.requested_batch = self.guards.limit(wanted, self.requested_batch)

    def _smooth(self, measured: GradientEstimate) -> None:
        # Weights 1, s, s^2, ... divided by their sum: the average is unbiased from the first test
        # on, as with Adam's bias correction.
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
