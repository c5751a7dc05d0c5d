"""The gradient statistics of a test step in the norm of the inner optimizer's steps.

The groups are those of `gradient_stats.py`; `dual_norms.py` has the formulas, and
`step_geometry.py` says how each parameter is measured. One tensor of a parameter's shape is summed
over the groups j of m_j samples, b in all, while gradients come in:

- of a parameter that is measured by elements, m_j g_j^2, for the variance of each element;
- of a matrix that is measured by singular values, or in blocks that are, +-g_j times a factor: the
  contrast of the even groups with the odd ones, which has the noise of the mean gradient and no
  signal. The covariance C takes one more sum, of the Gram matrices m_j g_j g_j' of the shorter
  side.

So the memory is one more copy of the gradients, and a Gram matrix for each of these matrices. On
shards the first sums stay on the shards. Gram matrices are summed over the ranks; only the mean and
the contrast of a matrix with fewer rows than columns, whose rows are on several shards, are
gathered, one matrix at a time. Each rank of an island takes the eigenvalues of some of the
matrices, and only scalars leave the island.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from adloco.algorithms.gradient_stats import Passes
from adloco.distributed.dtensor import (
    first_element,
    gathered_whole,
    is_sharded,
    local,
    zeros_like,
)
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import Block
from adloco.distributed.traffic import num_bytes
from adloco.lab.optimizer_norms.batch_rules import StepNormTest
from adloco.lab.optimizer_norms.dual_norms import DualNorms, by_elements, by_singular_values
from adloco.lab.optimizer_norms.step_geometry import MeasuredBlock, StepGeometry
from adloco.rules.moments import Moments
from adloco.rules.switch import BatchPlan


class DualMeasurement:
    """Measures the test steps of a worker in the norm of its optimizers' steps."""

    whole_gradients: ClassVar = False

    def __init__(
        self,
        rule: StepNormTest,
        params: Sequence[Tensor],
        statistics: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._params = params
        self._geometry = StepGeometry.of(rule.metric, params, optimizers)

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        return DualStep(
            plan=plan,
            passes=passes,
            engine=engine,
            params=self._params,
            geometry=self._geometry,
        ).backward()


@dataclass(frozen=True, kw_only=True)
class DualStep:
    """The forward and backward passes of one inner step on one rank, with statistics."""

    plan: BatchPlan
    """The micro-batches of the step, which are the groups; at least two."""
    passes: Passes
    """Returns an iterator over this rank's micro-batches; see `MeasuredStep.passes`."""
    engine: Engine
    """The worker's model on the ranks of its island."""
    params: Sequence[Tensor]
    """The trainable parameters."""
    geometry: StepGeometry

    def backward(self) -> tuple[Tensor, Moments]:
        """Compute the step's gradients, which are left in `grad`, and its statistics.

        Returns:
            (parts of the mean loss of this rank's micro-batches, moments of the whole worker).
        """
        losses, steps = [], self.passes(self.plan)
        sums = [
            zeros_like(each, torch.promote_types(each.dtype, torch.float32)) for each in self.params
        ]
        groups = _Groups(self.plan, self.geometry.blocks, sums)
        with self.engine.adding(sums, groups.transform):
            for group in range(self.engine.rank, len(self.plan.micro_batches), self.plan.ranks):
                groups.current = group
                losses.append(next(steps))
            losses += steps  # A rank without a group in the last pass takes part with weight 0.
        with torch.no_grad():
            norms = self._elements(sums) + self._singular_values(sums, groups.grams)
        return torch.stack(losses), norms.moments(
            len(self.plan.micro_batches), self.plan.worker_batch
        )

    def _elements(self, sums: Sequence[Tensor]) -> DualNorms:
        """The dual norms of the parameters that are measured by elements."""
        rows = [torch.zeros(6, dtype=torch.float64)]
        in_blocks = {each.parameter for each in self.geometry.blocks}
        for index, (parameter, squares) in enumerate(zip(self.params, sums, strict=True)):
            if parameter.grad is None or index in in_blocks:
                continue
            mean, own_sum = local(parameter.grad), local(squares)
            scatter = own_sum - self.plan.worker_batch * mean.to(own_sum.dtype).square()
            # A scatter is never negative, but rounding can push that of equal gradients below zero.
            deviations = (scatter.clamp_(min=0) / (len(self.plan.micro_batches) - 1)).sqrt_()
            moments = self.geometry.adam.get(index)
            roots = moments.roots(parameter) if moments else None
            if moments is None or roots is None:
                found = [_total(deviations), _total(mean.abs())]
                row = torch.nn.functional.pad(torch.stack(found), (0, 4))
            else:
                found = [_total(deviations / roots), _total(mean.abs() / roots), _total(roots)]
                row = torch.nn.functional.pad(torch.stack(found), (2, 1))
                row[5] = roots.numel()
            rows.append((row * (moments.rate if moments else 1.0)).cpu())
        total = torch.stack(rows).sum(dim=0) / self.engine.replicas
        plain, plain_mean, scaled, scaled_mean, roots_sum, count = self.engine.sum(total.tolist())
        length = roots_sum / count if count else 0.0
        return by_elements(
            plain + length * scaled,
            plain_mean + length * scaled_mean,
            groups=len(self.plan.micro_batches),
            samples=self.plan.worker_batch,
        )

    def _singular_values(self, sums: Sequence[Tensor], grams: Sequence[Tensor]) -> DualNorms:
        """The dual norms of the matrices that are measured by singular values."""
        rows = [torch.zeros(3, dtype=torch.float64)]
        for turn, (each, own_sum) in enumerate(zip(self.geometry.blocks, grams, strict=True)):
            gradient, contrast = self.params[each.parameter].grad, sums[each.parameter]
            if gradient is None:
                continue
            pair = gradient.to(contrast.dtype), contrast
            parts = [gram_part(self.engine, matrix, each.block) for matrix in pair]
            stacked = torch.stack([own_sum, *parts])
            self.engine.average([stacked])
            stacked *= self.plan.ranks
            if turn % self.plan.ranks == self.engine.rank:
                stacked[0] -= self.plan.worker_batch * stacked[1]
                stacked[0] /= len(self.plan.micro_batches) - 1
                rows.append(each.length * root_traces(stacked))
        total = torch.stack(rows).sum(dim=0)
        root_trace, mean, contrast_norm = self.engine.sum(total.tolist())
        return by_singular_values(
            root_trace,
            mean,
            contrast_norm,
            groups=len(self.plan.micro_batches),
            samples=self.plan.worker_batch,
        )


class _Groups:
    """Sums over the groups, while the gradients of their micro-batches come in."""

    def __init__(
        self, plan: BatchPlan, blocks: Sequence[MeasuredBlock], sums: Sequence[Tensor]
    ) -> None:
        """
        Args:
            plan: The micro-batches, which are the groups.
            blocks: What is measured by singular values.
            sums: A tensor for each trainable parameter, with the type and device of the sums.
        """
        self.current = 0
        """Number of the group whose gradients come in."""
        self.grams = [
            local(sums[each.parameter]).new_zeros(2 * (min(each.shape),)) for each in blocks
        ]
        """Sum of m_j g_j g_j' over this rank's groups, of each block."""
        self._of: dict[int, list[tuple[Block, Tensor]]] = {}
        for each, own in zip(blocks, self.grams, strict=True):
            self._of.setdefault(each.parameter, []).append((each.block, own))
        self._plan = plan
        even, odd = sum(plan.micro_batches[::2]), sum(plan.micro_batches[1::2])
        # The contrast is sqrt(even odd) / b times the difference of the halves' mean gradients. Its
        # covariance is C / b, as that of the mean gradient.
        self._factors = math.sqrt(odd / even), -math.sqrt(even / odd)

    def transform(self, index: int, gradient: Tensor) -> Tensor:
        """Return what a gradient adds to the sum of its parameter, and add to the Gram matrices.

        gradient: m_j / b times g_j of the current group.
        """
        value = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        weight = self._plan.worker_batch**2 / self._plan.micro_batches[self.current]
        if index not in self._of:
            return value.square().mul_(weight)
        for block, total in self._of[index]:
            total.add_(gram(value[block]), alpha=weight)
        return value * self._factors[self.current % 2]


def gram(matrix: Tensor) -> Tensor:
    """The inner products of the rows of a matrix, or of its columns if these are not more."""
    return matrix @ matrix.mT if matrix.size(0) < matrix.size(1) else matrix.mT @ matrix


def gram_part(engine: Engine, matrix: Tensor, block: Block) -> Tensor:
    """This rank's part of the Gram matrix (see `gram`) of a block of a matrix.

    The parts of the island's ranks add up to the Gram matrix. Called on all of them.

    Args:
        engine: The worker's model on the ranks of its island.
        matrix: A matrix that is sharded like a parameter.
        block: The part of it.
    """
    if not is_sharded(matrix):
        return gram(matrix[block]) / engine.replicas
    (rows, columns), own = block, local(matrix)
    first = first_element(matrix) // matrix.shape[1]
    begin, end = (min(max(row - first, 0), len(own)) for row in (rows.start, rows.stop))
    mine, height = own[begin:end, columns], rows.stop - rows.start
    if height >= columns.stop - columns.start:
        return mine.mT @ mine / engine.replicas
    # Products of rows on different ranks: there is no sum over the shards.
    engine.owners.traffic.inside += num_bytes([matrix])
    part, above = own.new_zeros(height, height), first + begin - rows.start
    part[above : above + len(mine)] = mine @ gathered_whole(matrix)[block].mT
    return part / engine.replicas


def root_traces(covariances: Tensor) -> Tensor:
    """tr C^(1/2) of covariance or Gram matrices [..., n, n], in float64 on the CPU.

    nan if a number is not finite. Rounding can make eigenvalues negative, which count as zero.
    For n = 128 the eigenvalues take 0.5 ms on a CPU core, and twelve Newton-Schulz steps 2.9 ms.
    """
    if not covariances.isfinite().all():
        return torch.full(covariances.shape[:-2], math.nan, dtype=torch.float64)
    roots: Tensor = torch.linalg.eigvalsh(covariances).clamp_(min=0).sqrt_()
    return roots.sum(dim=-1, dtype=torch.float64).cpu()


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)
