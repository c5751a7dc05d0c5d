"""The protocol of batch rules (docs/method.md; AdLoCo section 3, arXiv 2508.18182).

A batch rule turns an estimate of the gradient's statistics into a requested batch. It has no state:
the estimate, limits of growth and the current request are in `controller.py`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from adloco.rules.moments import GradientEstimate

UNBOUNDED = 2**40
"""The request, in samples, if |G|^2 cannot be told from zero; `BatchGuards` limit it."""


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


@runtime_checkable
class BatchRule(Protocol):
    """Decides a trainer's requested batch.

    `requested` is pure: the same numbers give the same answer on every rank.
    """

    @property
    def fewest_groups(self) -> int:
        """The fewest groups of samples per worker that the rule's gradient statistics need, at
        least 2; 1 if it needs no statistics.
        """

    @property
    def measurement(self) -> str:
        """Dotted path of the `Measurement` that takes the statistics; empty for squared norms of
        gradients.
        """

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        """The batch that the trainer should request, in samples per inner step over its workers.

        A rule without statistics is also asked before the first round, at 0 samples.

        estimate: What is known of the gradient's statistics; None if none were taken.
        """
