"""The gradient statistics of a test step, taken while its gradient is computed (docs/method.md).

The groups of the statistics are the micro-batches of the step's plan; g_j is the mean gradient of
group j, and gbar that of the whole batch. Hooks measure |g_j|^2 while gradients are accumulated.
The inner-product tests also need <g_j, gbar>, which takes a second pass once gbar is known.
`rules.moments` has the formulas.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adloco.algorithms.model_state import copy_all
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import added_gradients
from adloco.rules.batch_rules.batch_rule import Estimator
from adloco.rules.moments import Moments, group_moments
from adloco.rules.switch import BatchPlan

Passes = Callable[[BatchPlan], Iterator[Tensor]]
"""Returns an iterator over this rank's micro-batches. Each `next` runs the forward and backward
pass of one, and returns its part of the batch's mean loss."""


class TestStep(Protocol):
    """An inner step that takes statistics."""

    def backward(self) -> tuple[Tensor, Moments]:
        """As `MeasuredStep.backward`."""
        ...


class Measurement(Protocol):
    """Another way than `MeasuredStep` to measure a worker's test steps, which its batch rule names.

    It is made with (rule, trainable parameters, optimizers).
    """

    def step(self, plan: BatchPlan, passes: Passes, engine: Engine) -> TestStep:
        """A test step with these micro-batches, which are the groups."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The forward and backward passes of one inner step on one rank, with statistics."""

    plan: BatchPlan
    """The micro-batches of the step."""
    passes: Passes
    engine: Engine
    """The worker's model on the ranks of its island."""
    params: Sequence[Tensor]
    """The trainable parameters."""
    statistics: Sequence[Tensor]
    """Buffers that forward passes change (running statistics). They are restored after the second
    pass."""
    inner_products: Estimator | None
    """How Var<g_i, G> is estimated; None: it is not."""

    def backward(self) -> tuple[Tensor, Moments]:
        """Compute the step's gradients, which are left in `grad`, and its statistics.

        Returns:
            (parts of the mean loss of this rank's micro-batches, moments of the whole worker).
        """
        losses, norms_sq = [], self._zeros()
        even = self._sums() if self.inner_products == "unbiased" else []
        steps = self.passes(self.plan)
        with self.engine.incoming() as incoming:
            for group in self._own:
                kept = bool(even) and group % 2 == 0
                with added_gradients(self.params, even) if kept else contextlib.nullcontext():
                    losses.append(next(steps))
                norms_sq[group] = incoming.take() / self._fraction(group) ** 2
            losses += steps  # A rank without a group in the last pass takes part with weight 0.
        rows = [norms_sq]
        if self.inner_products:
            self._average_even(even)
            rows += self._inner_products(even)
        numbers = [self.engine.norm_sq_part(), *itertools.chain(*rows)]
        mean_norm_sq, *gathered = self.engine.sum(numbers)
        count = len(self.plan.micro_batches)
        norms_sq, *products = (gathered[at : at + count] for at in range(0, len(gathered), count))
        moments = group_moments(self.plan.micro_batches, norms_sq, mean_norm_sq, *products)
        return torch.stack(losses), moments

    def _inner_products(self, even: Sequence[Tensor]) -> list[list[float]]:
        """<g_j, gbar> of this rank's groups, and <g_j, even> if `even` is not empty.

        It takes a second pass over the groups, and memory for one more copy of the gradients.

        Args:
            even: The mean gradient of the samples of the groups 0, 2, 4, ...

        Returns:
            One or two rows with a number for each group of the worker; other ranks' are zero.
        """
        means = [None if own.grad is None else own.grad.clone() for own in self.params]
        before = [buffer.clone() for buffer in self.statistics]
        references: list[Sequence[Tensor | None]] = [means, *([even] if even else [])]
        products = [self._zeros() for _ in references]
        with contextlib.ExitStack() as stack:
            sums = [stack.enter_context(self.engine.incoming(other)) for other in references]
            self._set_gradients(itertools.repeat(None))
            for group, _ in itertools.zip_longest(self._own, self.passes(self.plan)):
                for row, incoming in zip(products, sums, strict=True):
                    if group is not None:
                        row[group] = incoming.take() / self._fraction(group)
                self._set_gradients(itertools.repeat(None))
        self._set_gradients(means)
        copy_all(before, self.statistics)
        return products

    def _average_even(self, sums: Sequence[Tensor]) -> None:
        """Turn this rank's sums over its even groups into the mean over all their samples."""
        self.engine.average(sums)
        even_samples = sum(self.plan.micro_batches[::2])
        for total in sums:
            total.mul_(self.plan.ranks * self.plan.worker_batch / even_samples)

    def _sums(self) -> list[Tensor]:
        """Zeros with the shapes of the parameters, in float32 or a more precise type."""
        types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self.params]
        pairs = zip(self.params, types, strict=True)
        return [zeros_like(parameter, dtype, to_host=False) for parameter, dtype in pairs]

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self.params, gradients, strict=False):
            parameter.grad = gradient

    @property
    def _own(self) -> range:
        """Numbers of the groups that this rank computes."""
        return range(self.engine.rank, len(self.plan.micro_batches), self.plan.ranks)

    def _fraction(self, group: int) -> float:
        return self.plan.micro_batches[group] / self.plan.worker_batch

    def _zeros(self) -> list[float]:
        """A zero for each group. Other ranks' groups stay zero until all ranks' are added up."""
        return [0.0] * len(self.plan.micro_batches)
