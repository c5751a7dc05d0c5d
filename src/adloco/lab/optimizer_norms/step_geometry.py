"""The norm that belongs to the inner optimizer's step on each parameter (dual_norms.py).

**Adam.** With its second moments v held fixed, Adam is seen as a method that steps by signs in the
coordinates y_i = sqrt(v_i) x_i. The gradient in these is g_i / sqrt(v_i), so the dual norm of such
a step is the sum of |g_i| / sqrt(v_i). The step's length is the one that promises as much as Adam's
own step where gradients are as large as v says: lr sum_i sqrt(v_i) from Adam, with the learning
rate lr, and the length times the number of elements from the signs. So the length is lr times the
mean of sqrt(v_i). Before its first step Adam has no second moments, and steps by signs: v = 1.

**Muon.** Its step on a matrix, or on each block that it orthogonalises on its own (`inner.split`),
has a length in the norm of the largest singular value that depends on the shape (`step_length`).
The dual norm is the sum of singular values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from adloco.algorithms.muon_step import Muon, blocks_of, step_length
from adloco.distributed.dtensor import local
from adloco.distributed.parallel.gradient_norms import Block
from adloco.errors import require
from adloco.lab.optimizer_norms.batch_rules import Metric


@dataclass(frozen=True, kw_only=True)
class SecondMoments:
    """The place of the second moments of a parameter's gradient."""

    optimizer: Optimizer
    beta: float
    """Weight of the past in v at a step."""
    epsilon: float
    """Adam's constant that is added to sqrt(v)."""
    rate: float
    """The parameter's learning rate, as a multiple of that of the worker's first group."""

    def roots(self, parameter: Tensor) -> Tensor | None:
        """sqrt(v) of this rank's part of the parameter, with Adam's bias correction and epsilon.

        v is at least what the gradient that the parameter has now will add to it: it can be zero
        before, as in embeddings of tokens that were not seen yet. Otherwise v is that of the steps
        before, which does not depend on the gradient's noise. None before the first step.
        """
        state, gradient = self.optimizer.state.get(parameter, {}), parameter.grad
        if "exp_avg_sq" not in state or gradient is None or not state["step"]:
            return None  # No step yet, or none since the state was forgotten.
        moments, own = local(state["exp_avg_sq"]), local(gradient)
        wide = torch.promote_types(moments.dtype, torch.float32)
        v: Tensor = torch.maximum(moments.to(wide), own.to(wide).square().mul_(1 - self.beta))
        return v.div_(1 - self.beta ** state["step"]).sqrt_().add_(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """A matrix, or a block of one, that is measured by its singular values."""

    parameter: int
    """Index of the parameter that it is a block of."""
    block: Block
    length: float
    """Length of its step at the learning rate of the worker's first group."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.block
        return rows.stop - rows.start, columns.stop - columns.start


@dataclass(frozen=True, kw_only=True)
class StepGeometry:
    """Measures the gradients of a worker's trainable parameters.

    Parameters that are in neither field are measured as if they were stepped by signs.
    """

    blocks: Sequence[MeasuredBlock] = ()
    """Blocks that are measured by singular values."""
    adam: Mapping[int, SecondMoments] = field(default_factory=dict)
    """Parameters that are measured after dividing by the roots of second moments, by index."""

    @staticmethod
    def of(
        metric: Metric, params: Sequence[Tensor], optimizers: Sequence[Optimizer]
    ) -> StepGeometry:
        """The geometry of a metric for these parameters and their optimizers.

        Raises:
            ValueError: The optimizers take no steps of the kind that the metric measures.
        """
        if metric == "sign":
            return StepGeometry()
        indices = {parameter: index for index, parameter in enumerate(params)}
        unit = float(optimizers[0].param_groups[0]["lr"])
        blocks: list[MeasuredBlock] = []
        adam: dict[int, SecondMoments] = {}
        for optimizer in optimizers:
            by_muon = metric == "muon" and isinstance(optimizer, Muon)
            require(
                by_muon or isinstance(optimizer, torch.optim.Adam),
                f"batch.metric {metric} needs second moments of the gradient, which the inner "
                f"optimizer {type(optimizer).__name__} does not have; use "
                f"{'muon' if isinstance(optimizer, Muon) else 'sign'}",
            )
            for group in optimizer.param_groups:
                rate = float(group["lr"]) / unit
                for parameter in group["params"]:
                    index = indices[parameter]
                    if by_muon:
                        blocks += _blocks(index, parameter, group["blocks"], rate)
                    else:
                        adam[index] = SecondMoments(
                            optimizer=optimizer,
                            beta=group["betas"][1],
                            epsilon=group["eps"],
                            rate=rate,
                        )
        require(
            metric == "adam" or bool(blocks),
            "batch.metric muon measures the steps of Muon, and the inner optimizer is "
            f"{type(optimizers[0]).__name__}; use adam, or inner.optimizer muon",
        )
        return StepGeometry(blocks=blocks, adam=adam)


def _blocks(
    parameter: int, matrix: Tensor, sizes: Sequence[int], rate: float
) -> Iterator[MeasuredBlock]:
    for block in blocks_of(matrix.shape, sizes):
        own = MeasuredBlock(parameter=parameter, block=block, length=rate)
        yield replace(own, length=rate * step_length(own.shape))
