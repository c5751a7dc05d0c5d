"""The statistics that a worker takes on a test step, while it computes the step's gradient (DESIGN
section 4).

The batch is split into groups, the micro-batches of the step's plan. |g_j|^2 of each comes from
hooks while gradients are accumulated. The inner-product tests need <g_j, gbar> as well, which takes
a second pass once gbar is known; docs/method.md says what follows from them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adloco.algorithms.model_state import copy_all
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import added_gradients
from adloco.rules.batch_rules.batch_rule import Estimator
from adloco.rules.moments import Moments, group_moments
from adloco.rules.switch import BatchPlan


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Forward and backward of one inner step, with statistics. Each rank of an island has one."""

    plan: BatchPlan
    passes: Callable[[BatchPlan], Iterator[Tensor]]
    """Begins a pass over this rank's micro-batches: each `next` takes one forward and backward,
    its loss weighted by its part of the batch, and returns that part of the mean loss."""
    engine: Engine
    params: Sequence[Tensor]
    statistics: Sequence[Tensor]
    """Buffers that a pass changes; a second pass leaves no trace in them."""
    inner_products: Estimator | None
    """How Var<g_i, G> is estimated, if it is."""

    def backward(self) -> tuple[Tensor, Moments]:
        """Losses of this rank's micro-batches, and the moments of all; leaves the step's gradients
        in `grad`.
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
            losses += steps  # A rank without a group takes part with a pass of weight 0.
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
        """<g_j, gbar>, and <g_j, even> if that mean gradient is given, of this rank's groups.

        Takes a second pass over them: exact for any number of groups, with one gradient copy more.
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
        """Turn this rank's sums over its even groups into the mean over samples of even groups."""
        self.engine.average(sums)
        even_samples = sum(self.plan.micro_batches[::2])
        for total in sums:
            total.mul_(self.plan.ranks * self.plan.worker_batch / even_samples)

    def _sums(self) -> list[Tensor]:
        """Zeros to which gradients are added, in float32 or better."""
        types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self.params]
        pairs = zip(self.params, types, strict=True)
        return [zeros_like(parameter, dtype, to_host=False) for parameter, dtype in pairs]

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self.params, gradients, strict=False):
            parameter.grad = gradient

    @property
    def _own(self) -> range:
        """The groups that this rank takes."""
        return range(self.engine.rank, len(self.plan.micro_batches), self.plan.ranks)

    def _fraction(self, group: int) -> float:
        return self.plan.micro_batches[group] / self.plan.worker_batch

    def _zeros(self) -> list[float]:
        """A number for each group; those of other ranks stay zero until they are added up."""
        return [0.0] * len(self.plan.micro_batches)
