"""A run's budget: when it is spent, and how many inner steps of the next round it allows."""

import math
from dataclasses import dataclass

from adloco.config.sections import Recipe


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a run trains."""

    tokens: int
    """Tokens over all trainers; the inner step that reaches them is the last."""
    tokens_per_sample: int
    sync_every: int

    @staticmethod
    def of(recipe: Recipe) -> "Budget":
        """The budget that a recipe states."""
        return Budget(
            tokens=recipe.run.tokens,
            tokens_per_sample=recipe.data.context_tokens,
            sync_every=recipe.method.sync_every,
        )

    def spent(self, samples: int) -> bool:
        """True if no inner step is left.

        Args:
            samples: Samples that the run has trained on, over all trainers.
        """
        return samples * self.tokens_per_sample >= self.tokens

    def round_steps(self, samples: int, samples_per_inner_step: int) -> int:
        """Inner steps of the next round: `sync_every`, or fewer if the budget ends earlier.

        Args:
            samples: Samples that the run has trained on.
            samples_per_inner_step: Samples of one inner step over all trainers, as planned.
        """
        left = self.tokens - samples * self.tokens_per_sample
        step = samples_per_inner_step * self.tokens_per_sample
        return min(self.sync_every, math.ceil(left / step))
