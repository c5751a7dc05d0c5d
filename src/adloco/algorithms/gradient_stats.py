"""The gradient statistics of a test step, taken while its gradient is computed (docs/method.md).

The groups of the statistics are the micro-batches of the step's plan; g_j is the mean gradient of
group j, and gbar that of the whole batch. |g_j|^2 is measured while gradients are accumulated: by
hooks, and on shards where their sums arrive (`distributed/parallel/fsdp.py`).
`rules.moments` has the formulas. A batch rule may name another `Measurement`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from adloco.distributed.parallel.engine import Engine
from adloco.dotted_path import load_object
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.moments import Moments, group_moments
from adloco.rules.switch import BatchPlan

Passes = Callable[[BatchPlan], Iterator[Tensor]]
"""Returns an iterator over this rank's micro-batches. Each `next` runs the forward and backward
pass of one, and returns its part of the batch's mean loss."""


class Measurement(Protocol):
    """Measures the test steps of a worker. A batch rule names it by a dotted path.

    It keeps nothing from one step to the next, because no checkpoint has its attributes.
    """

    whole_gradients: ClassVar[bool]
    """True if it needs whole gradients, so that a worker cannot be in shards."""

    def __init__(self, rule: Any, params: Sequence[Tensor], statistics: Sequence[Tensor]) -> None:
        """
        Args:
            rule: The batch rule.
            params: The worker's trainable parameters.
            statistics: Buffers that forward passes change (running statistics).
        """

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        """Compute the gradients of a test step, which are left in `grad`, and its statistics.

        Returns:
            (parts of the mean loss of this rank's micro-batches, moments of the whole worker).
        """


class NormMeasurement:
    """Measures squared norms of gradients."""

    whole_gradients: ClassVar = False

    def __init__(
        self, rule: BatchRule, params: Sequence[Tensor], statistics: Sequence[Tensor]
    ) -> None:
        """It needs none of these."""

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        losses, own = MeasuredStep(plan=plan, passes=passes, engine=engine).with_norms()
        numbers = engine.sum_on_device([engine.norm_sq_part(), *own])
        mean_norm_sq, *norms_sq = numbers.tolist()  # Waits for the device, once.
        return losses, group_moments(plan.micro_batches, norms_sq, mean_norm_sq)


def measurement_of(rule: BatchRule) -> type[Measurement]:
    """The measurement that a batch rule names."""
    if not rule.measurement:
        return NormMeasurement
    found: type[Measurement] = load_object(rule.measurement)
    return found


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The forward and backward passes of one inner step on one rank, with squared norms."""

    plan: BatchPlan
    passes: Passes
    engine: Engine

    def with_norms(self) -> tuple[Tensor, list[Tensor | float]]:
        """Compute the step's gradients.

        Returns:
            (parts of the mean loss of this rank's micro-batches, |g_j|^2 of its groups).
        """
        losses, norms_sq = [], self.zeros()
        steps = self.passes(self.plan)
        with self.engine.incoming() as incoming:
            for group in self.own_groups:
                losses.append(next(steps))
                norms_sq[group] = incoming.take() / self.fraction(group) ** 2
            losses += steps  # A rank without a group in the last pass takes part with weight 0.
        return torch.stack(losses), norms_sq

    @property
    def own_groups(self) -> range:
        """Numbers of the groups that this rank computes."""
        return range(self.engine.rank, len(self.plan.micro_batches), self.plan.ranks)

    def fraction(self, group: int) -> float:
        """The share of the worker's samples that a group has."""
        return self.plan.micro_batches[group] / self.plan.worker_batch

    def zeros(self) -> list[Tensor | float]:
        """A zero for each group. Other ranks' groups stay zero until all ranks' are added up."""
        return [0.0] * len(self.plan.micro_batches)
