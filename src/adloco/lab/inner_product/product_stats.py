"""The gradient statistics of the inner-product tests.

Beside |g_j|^2 they need <g_j, gbar>, which takes a second pass over the groups once gbar is known.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from adloco.algorithms.gradient_stats import MeasuredStep, Passes
from adloco.algorithms.model_state import copy_all
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import GradientSums, watched
from adloco.lab.inner_product.batch_rules import ProductRule
from adloco.rules.moments import Moments, group_moments
from adloco.rules.switch import BatchPlan


class ProductMeasurement:
    """Measures the test steps of a worker for an inner-product test.

    It takes memory for one more copy of the gradients.
    """

    whole_gradients: ClassVar = True

    def __init__(
        self, rule: ProductRule, params: Sequence[Tensor], statistics: Sequence[Tensor]
    ) -> None:
        self._params, self._statistics = params, statistics

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        step = MeasuredStep(plan=plan, passes=passes, engine=engine)
        losses, own = step.with_norms()
        numbers = [engine.norm_sq_part(), *own, *self._inner_products(step)]
        mean_norm_sq, *gathered = engine.sum_on_device(numbers).tolist()
        samples = plan.micro_batches
        norms_sq, products = gathered[: len(samples)], gathered[len(samples) :]
        inner_variance = plug_in(samples, mean_norm_sq, products)
        return losses, group_moments(samples, norms_sq, mean_norm_sq, inner_variance)

    def _inner_products(self, step: MeasuredStep) -> list[Tensor | float]:
        """<g_j, gbar> of this rank's groups; a number for each group of the worker, and those of
        other ranks are zero. A second pass, after which gradients and statistics are as before it.
        """
        means = [None if own.grad is None else own.grad.clone() for own in self._params]
        before = [buffer.clone() for buffer in self._statistics]
        products = step.zeros()
        with products_with(self._params, means) as incoming:
            self._set_gradients(itertools.repeat(None))
            for group, _ in itertools.zip_longest(step.own_groups, step.passes(step.plan)):
                if group is not None:
                    products[group] = incoming.take() / step.fraction(group)
                self._set_gradients(itertools.repeat(None))
        self._set_gradients(means)
        copy_all(before, self._statistics)
        return products

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self._params, gradients, strict=False):
            parameter.grad = gradient


def plug_in(samples: Sequence[int], mean_norm_sq: float, inner_products: Sequence[float]) -> float:
    """Var<g_i, G> as gbar' Sigma^ gbar with the sample covariance Sigma^ of the groups: from their
    m_j, from |gbar|^2, and from their <g_j, gbar>.

    Its expectation is too large by tr(Sigma^2) / b for Gaussian gradients with covariance Sigma.
    """
    pairs = zip(samples, inner_products, strict=True)
    return sum(m * (product - mean_norm_sq) ** 2 for m, product in pairs) / max(1, len(samples) - 1)


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
