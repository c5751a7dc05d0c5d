"""The schedule of the inner learning rate: a warm-up, then cosine, WSD (warm-up, stable, decay) or
constant; and how the rate follows the trainer's batch.

Schedules run on tokens and never on steps, because a step has more tokens when the batch grows.
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from adloco.errors import require, require_choices, require_range
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A factor on the inner optimizer's learning rate.

    It depends on the tokens that the run has seen and on the trainer's batch. No shape is cyclic
    (arXiv 2412.21124 names such rates): a rate that rises again has no end at which runs of equal
    tokens can be compared.
    """

    shape: Literal["cosine", "wsd", "constant"] = setting("cosine", aliases=("scheduler",))
    """Shape after the warm-up. cosine: half a cosine down to the final fraction; wsd: constant,
    then a linear decay to the final fraction; constant: no decay.
    """
    total_tokens: int = 0
    """Tokens at which the schedule ends; in a recipe 0 means run.tokens."""
    warmup_fraction: float = setting(0.02, aliases=("warmup",))
    """Fraction of total_tokens over which the rate rises linearly from zero."""
    final_fraction: float = 0.1
    """Rate at the end, as a fraction of the peak (cosine and wsd)."""
    decay_fraction: float = 0.2
    """Fraction of total_tokens over which wsd decays, at most what the warm-up leaves."""
    coupling: Literal["none", "sqrt", "linear"] = "none"
    """Factor on the rate from r = trainer's batch / reference_batch. none: 1; sqrt: the square root
    of r; linear: r."""
    reference_batch: int = 8
    """Trainer's batch, in samples, at which the coupling factor is 1."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_range(self, "total_tokens", at_least=0)
        require_range(self, "warmup_fraction", "final_fraction", at_least=0, at_most=1)
        require_range(self, "decay_fraction", above=0, at_most=1)
        require_range(self, "reference_batch", above=0)

    def lengthened(self, tokens_done: int, total_tokens: int) -> "LearningRate":
        """The schedule of a run that is made longer than its schedule.

        A constant rate stays as it is. A wsd schedule whose decay has not begun decays later; its
        warm-up keeps its tokens.

        total_tokens: Tokens at which the longer run ends.

        Raises:
            ValueError: The rate has begun to fall to the end that was planned.
        """
        if self.shape == "constant" or total_tokens <= self.total_tokens:
            return self
        stable = self.total_tokens - self._decay_tokens
        require(
            self.shape == "wsd" and tokens_done <= stable,
            f"learning_rate.shape {self.shape} cannot be lengthened to {total_tokens:,} tokens: "
            f"the rate falls to its end at {self.total_tokens:,} tokens, and the run has seen "
            f"{tokens_done:,}; begin a run that may become longer with constant, or a larger "
            "learning_rate.total_tokens",
        )
        warmup = self.warmup_fraction * self.total_tokens / total_tokens
        return replace(self, total_tokens=total_tokens, warmup_fraction=warmup)

    def factor(self, tokens: int, trainer_batch: int) -> float:
        """The factor for one inner step of a trainer.

        Args:
            tokens: Tokens that the run has seen at the end of the step.
            trainer_batch: Samples of the step over all workers of the trainer.
        """
        power: float = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.coupling]
        warmup = self.warmup_fraction * self.total_tokens
        fraction = tokens / warmup if tokens < warmup else self.decay(tokens)
        return fraction * math.pow(trainer_batch / self.reference_batch, power)

    @property
    def _decay_tokens(self) -> float:
        """Tokens over which wsd decays."""
        return min(self.decay_fraction, 1 - self.warmup_fraction) * self.total_tokens

    def check_growth(self, growth: float) -> None:
        """Raise ValueError if rounds that become longer as the rate falls would have no end."""
        end = 1.0 if self.shape == "constant" else self.final_fraction
        require(
            growth == 0 or 0 < end < 1,
            "method.sync_growth needs a learning rate that falls (learning_rate.shape cosine or "
            "wsd), and not to 0, where rounds would have no end; it falls to a fraction of "
            f"{end:g} here (learning_rate.final_fraction)",
        )

    def mean_decay(self, power: float) -> float:
        """The mean of `decay` to a power over the tokens of the schedule."""
        whole = replace(self, total_tokens=200)
        return statistics.fmean(whole.decay(tokens) ** power for tokens in range(1, 200, 2))

    def decay(self, tokens: int) -> float:
        """Fraction of the peak rate that the decay leaves after so many tokens of the run, from 1
        (always, during the warm-up) to `final_fraction`.
        """
        warmup = self.warmup_fraction * self.total_tokens
        if self.shape == "constant" or tokens < warmup:
            return 1.0
        if self.shape == "cosine":
            done = min(1.0, (tokens - warmup) / max(1.0, self.total_tokens - warmup))
            left = (1 + math.cos(math.pi * done)) / 2
        else:
            left = (self.total_tokens - tokens) / max(1.0, self._decay_tokens)
        return self.final_fraction + (1 - self.final_fraction) * min(1.0, max(0.0, left))
