"""The inner learning rate: warm-up, then cosine, WSD or constant, in tokens, and how it follows the
batch.

Schedules run on tokens, never on steps: a step changes its meaning when the batch grows.
"""

import math
from dataclasses import dataclass
from typing import Literal

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A factor on the inner optimizer's learning rate, from the tokens seen by the run and the
    trainer's batch.
    """

    shape: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine: half a cosine down to the final fraction; wsd: constant, then linear decay; constant.
    """
    total_tokens: int = 0
    """Tokens at which the schedule ends; in a recipe 0 means the run's budget."""
    warmup_fraction: float = 0.02
    """Part of all tokens over which the rate rises linearly from zero."""
    final_fraction: float = 0.1
    """Rate at the end, as a fraction of the peak (cosine and wsd)."""
    decay_fraction: float = 0.2
    """Part of all tokens over which wsd decays."""
    coupling: Literal["none", "sqrt", "linear"] = "none"
    """How the rate grows with the trainer's batch over the reference batch."""
    reference_batch: int = 8
    """Trainer's batch, in samples, at which the coupling factor is 1."""

    def __post_init__(self) -> None:
        require(
            self.shape in ("cosine", "wsd", "constant"),
            f"shape must be cosine, wsd or constant, got {self.shape!r}",
        )
        require(
            self.total_tokens >= 0,
            f"total_tokens must be >= 0, got {self.total_tokens}",
        )
        require(
            0 <= self.warmup_fraction <= 1,
            f"warmup_fraction must be in [0, 1], got {self.warmup_fraction}",
        )
        require(
            0 <= self.final_fraction <= 1,
            f"final_fraction must be in [0, 1], got {self.final_fraction}",
        )
        require(
            0 < self.decay_fraction <= 1,
            f"decay_fraction must be in (0, 1], got {self.decay_fraction}",
        )
        require(
            self.coupling in ("none", "sqrt", "linear"),
            f"coupling must be none, sqrt or linear, got {self.coupling!r}",
        )
        require(
            self.reference_batch > 0,
            f"reference_batch must be > 0, got {self.reference_batch}",
        )

    def factor(self, tokens: int, trainer_batch: int) -> float:
        """Factor for the inner step that ends at `tokens` tokens of the run, for a trainer that
        takes `trainer_batch` samples a step.
        """
        power: float = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.coupling]
        return self._fraction(tokens) * math.pow(trainer_batch / self.reference_batch, power)

    def _fraction(self, tokens: int) -> float:
        warmup = self.warmup_fraction * self.total_tokens
        if tokens < warmup:
            return tokens / warmup
        if self.shape == "cosine":
            done = min(1.0, (tokens - warmup) / max(1.0, self.total_tokens - warmup))
            return (
                self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * done)) / 2
            )
        if self.shape == "wsd":
            left = max(
                0.0,
                (self.total_tokens - tokens) / max(1.0, self.decay_fraction * self.total_tokens),
            )
            return self.final_fraction + (1 - self.final_fraction) * min(1.0, left)
        return 1.0
