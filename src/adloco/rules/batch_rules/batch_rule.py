"""The protocol of batch rules, and what the rules share (docs/method.md; AdLoCo section 3, arXiv
2508.18182).

A batch rule turns an estimate of the gradient's statistics into a requested batch. It has no state:
the estimate, limits of growth and the current request are in `controller.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from adloco.rules.moments import GradientEstimate

UNBOUNDED = 2**40
"""The request, in samples, if |G|^2 cannot be told from zero; `BatchGuards` limit it."""

UNKNOWN = 3.0
"""|G|^2 cannot be told from zero if it is known to within this factor only, up or down. Noise then
dominates at the batch of the tests, and a larger batch is asked for until it does not."""

Estimator = Literal["unbiased", "plug-in"]
"""Estimator of the true gradient's statistics; see `GradientEstimate`."""


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """Progress of a trainer's training at a decision about its batch."""

    samples: int
    """Samples that the trainer has trained on so far."""
    requested_batch: int
    """The current requested batch, in samples per inner step over all the trainer's workers."""
    initial_batch: int
    """The requested batch at the start."""
    decay: float = 1.0
    """Fraction of the peak learning rate that the schedule's decay leaves, from 1 to 0."""
    seed: int = 0
    """Seed of the run, for a rule that draws random numbers."""
    eta: float | None = None
    """eta in force of a run (`Chosen.eta`); None: the rule's own."""


class BatchRule(Protocol):
    """Decides a trainer's requested batch.

    `requested` is pure: the same numbers give the same answer on every rank.
    """

    @property
    def fewest_groups(self) -> int:
        """The fewest groups of samples per worker that the rule's gradient statistics need, at
        least 2; 1 if it needs no statistics.
        """
        ...

    @property
    def measurement(self) -> str:
        """Dotted path of the `Measurement` that takes the statistics; empty for squared norms of
        gradients.
        """
        ...

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        """The batch that the trainer should request, in samples per inner step over its workers.

        A rule without statistics is also asked before the first round, at 0 samples.

        Args:
            estimate: What is known of the gradient's statistics; None if none were taken.
            point: How far the trainer's training has come.
        """
        ...


def samples_needed(variance: float, tolerance: float, norm: float) -> int:
    """The smallest batch b >= 1 with variance / b <= tolerance^2 norm; at most UNBOUNDED.

    `norm` is the power of |G| that has the unit of the variance: |G|^2 or |G|^4.
    """
    if variance <= 0:
        return 1
    allowed = tolerance**2 * norm
    return max(1, math.ceil(min(variance / allowed, UNBOUNDED))) if allowed > 0 else UNBOUNDED


def estimated_norm_sq(estimate: GradientEstimate, estimator: Estimator) -> float:
    """|G|^2 by this estimator; 0 if it cannot be told from zero."""
    if estimator == "plug-in":
        return estimate.plugin_norm_sq
    return estimate.grad_norm_sq if estimate.norm_factor <= UNKNOWN else 0.0
