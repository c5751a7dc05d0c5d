"""The gradient statistics of the inner-product tests.

Beside |g_j|^2 they need <g_j, gbar>, which takes a second pass over the groups once gbar is known;
`inner_variance.py` has the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adloco.algorithms.gradient_stats import MeasuredStep, Passes
from adloco.algorithms.model_state import copy_all
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import GradientSums, watched
from adloco.lab.inner_product.batch_rules import ProductRule
from adloco.lab.inner_product.inner_variance import plug_in, unbiased
from adloco.rules.batch_rules.norm_test import Estimator
from adloco.rules.moments import Moments, group_moments
from adloco.rules.switch import BatchPlan


class ProductMeasurement:
    """Measures the test steps of a worker for an inner-product test."""

    whole_gradients: ClassVar = True

    def __init__(
        self,
        rule: ProductRule,
        params: Sequence[Tensor],
        statistics: Sequence[Tensor],
    ) -> None:
        self._estimator, self._params, self._statistics = rule.estimator, params, statistics

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        return ProductStep(
            plan=plan,
            passes=passes,
            engine=engine,
            params=self._params,
            statistics=self._statistics,
            estimator=self._estimator,
        ).backward()


@dataclass(frozen=True, kw_only=True)
class ProductStep(MeasuredStep):
    """One inner step on one rank, with squared norms and inner products.

    It takes memory for copies of the gradient: one for the plug-in form, two for the unbiased one.
    """

    params: Sequence[Tensor]
    """The trainable parameters."""
    statistics: Sequence[Tensor]
    """Buffers that forward passes change (running statistics). They are restored after the second
    pass."""
    estimator: Estimator
    """Estimator of Var<g_i, G>."""

    def backward(self) -> tuple[Tensor, Moments]:
        """Compute the step's gradients and statistics; see `Measurement.backward`."""
        even = self._sums() if self.estimator == "unbiased" else []

        def add(index: int, gradient: Tensor) -> None:
            even[index].add_(gradient)

        def during(group: int) -> AbstractContextManager[None]:
            kept = bool(even) and group % 2 == 0
            return watched(self.params, add) if kept else nullcontext()

        losses, own = self.with_norms(during)
        self._average_even(even)
        rows = [own, *self._inner_products(even)]
        numbers = [self.engine.norm_sq_part(), *itertools.chain(*rows)]
        mean_norm_sq, *gathered = self.engine.sum_on_device(numbers).tolist()
        samples = self.plan.micro_batches
        count = len(samples)
        norms_sq, *products = (gathered[at : at + count] for at in range(0, len(gathered), count))
        inner_variance = (
            unbiased(samples, norms_sq, *products)
            if even
            else plug_in(samples, mean_norm_sq, *products)
        )
        return losses, group_moments(samples, norms_sq, mean_norm_sq, inner_variance)

    def _inner_products(self, even: Sequence[Tensor]) -> list[list[Tensor | float]]:
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
        products = [self.zeros() for _ in references]
        with ExitStack() as stack:
            sums = [stack.enter_context(products_with(self.params, each)) for each in references]
            self._set_gradients(itertools.repeat(None))
            for group, _ in itertools.zip_longest(self.own_groups, self.passes(self.plan)):
                for row, incoming in zip(products, sums, strict=True):
                    if group is not None:
                        row[group] = incoming.take() / self.fraction(group)
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
        return [zeros_like(parameter, dtype) for parameter, dtype in pairs]

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self.params, gradients, strict=False):
            parameter.grad = gradient


@contextmanager
def products_with(
    parameters: Sequence[Tensor], reference: Sequence[Tensor | None]
) -> Iterator[GradientSums]:
    """Sum the inner product <g, reference> of every incoming gradient g while open.

    reference: A tensor for each parameter, or None for zero.
    """
    sums = GradientSums()

    def see(index: int, gradient: Tensor) -> None:
        if (other := reference[index]) is not None:
            sums.add((gradient.double() * other.detach().double()).sum())

    with watched(parameters, see):
        yield sums
