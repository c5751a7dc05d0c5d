"""Muon's step (Jordan et al., 2024), on matrices that are whole, replicated or sharded.

The momentum and the parameters stay where they are. Each matrix is orthogonalised by one rank of
the island (`distributed/parallel/whole_matrices.py`), together with others of its shape. That is
computed in bf16 only where the device does so natively: a CPU without instructions for bf16
emulates it, which took five sixths of the time of the default recipe (reproduce/LOG.md,
2026-11-23).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from adloco.algorithms.short_types import LOST, exact, is_short, put
from adloco.distributed.device import native_bf16
from adloco.distributed.dtensor import converted, local, shard_group
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic

QUINTIC = (3.4445, -4.775, 2.0315)
"""a, b and c: each Newton-Schulz step takes a singular value s to a s + b s^3 + c s^5 (those of
Jordan et al., 2024, and torch.optim.Muon)."""
NEWTON_SCHULZ_STEPS = 5
"""They take singular values from 0.01 to 1 of the norm to 0.68 to 1.13."""
Block = tuple[slice, slice]
"""The rows and columns of a part of a matrix."""
LEAST_NORM = 1e-7
"""Matrices of a smaller norm are divided by this one."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay; its state is torch.optim.Muon's,
    and for parameters of two bytes what rounding takes off them.

    Its steps have the root mean square of AdamW's (arXiv 2502.16982), so that one learning rate is
    right for both.
    """

    owners: MatrixOwners | None = None
    """The ranks that share the work; None: those that have the shards of a matrix, if it has any.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        """
        Args:
            matrices: Parameters of two dimensions, or groups of them. A group may have `blocks`:
                sizes of the blocks along the longer side that are orthogonalised on their own.
            weight_decay: Each step takes lr times this share off the matrices.
            momentum: Share of the old momentum in the new one.
        """
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "blocks": ()}
        super().__init__(matrices, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            spread: dict[Any, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    found = None if self.owners else shard_group(matrix)
                    spread.setdefault(found, []).append(matrix)
            for shards, matrices in spread.items():
                owners = self.owners or MatrixOwners(Traffic(), shards=shards)
                owners.do(_Step(matrices, self.state, group))
        return loss


class _Step:
    """A step of one group of matrices, as work for their owners."""

    def __init__(
        self, matrices: Sequence[Tensor], state: dict[Tensor, Any], group: dict[str, Any]
    ) -> None:
        self.matrices = matrices
        first = local(matrices[0])
        self.dtype = (
            torch.bfloat16
            if native_bf16(first.device)
            else torch.promote_types(first.dtype, torch.float32)
        )
        self._group = group
        self._gradients = [local(matrix.grad) for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            for name in ("momentum_buffer", *[LOST] * is_short(matrix)):
                if name not in state[matrix]:
                    state[matrix][name] = torch.zeros_like(matrix)
        self._momenta = [local(state[matrix]["momentum_buffer"]) for matrix in matrices]
        self._lost = {
            index: local(state[matrix][LOST])
            for index, matrix in enumerate(matrices)
            if is_short(matrix)
        }
        # On every replica, not only the owner's, because a checkpoint is of one replica.
        torch._foreach_lerp_(self._momenta, self._gradients, 1 - group["momentum"])

    def given(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """The mixtures of gradients and momenta, which are Nesterov's."""
        gradients = [self._gradients[index] for index in indices]
        momenta = [self._momenta[index] for index in indices]
        return torch._foreach_lerp(gradients, momenta, self._group["momentum"])

    def compute(self, stack: Tensor) -> Tensor:
        """The directions of the step: of whole matrices, or of the blocks of each.

        `take` multiplies by the step length of a whole matrix, so blocks are scaled to theirs.
        """
        sizes, shape = self._group["blocks"], stack.shape[1:]
        if not sizes:
            return orthogonal(stack)
        directions = torch.empty_like(stack)
        for block in blocks_of(shape, sizes):
            part = orthogonal(stack[:, *block])
            directions[:, *block] = part * (step_length(part.shape[1:]) / step_length(shape))
        return directions

    def take(self, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        shards = [local(self.matrices[index]) for index in indices]
        lr, length = self._group["lr"], step_length(self.matrices[indices[0]].shape)
        short = [at for at, shard in enumerate(shards) if is_short(shard)]
        rounded, lost = [shards[at] for at in short], [self._lost[indices[at]] for at in short]
        values = list(shards)
        for at, value in zip(short, exact(rounded, lost) if short else [], strict=True):
            values[at] = value
        if self._group["weight_decay"]:
            torch._foreach_mul_(values, 1 - lr * self._group["weight_decay"])
        # One kernel adds all steps. They are rounded only where they are added, so they have the
        # finer of the two types.
        steps = converted(results, torch.promote_types(values[0].dtype, results[0].dtype))
        if isinstance(lr, Tensor):  # In a captured update.
            torch._foreach_add_(values, list(torch._foreach_mul(steps, lr * -length)))
        else:
            torch._foreach_add_(values, steps, alpha=-lr * length)
        if short:
            put(rounded, lost, [values[at] for at in short])


def blocks_of(shape: Sequence[int], sizes: Sequence[int]) -> list[Block]:
    """The blocks of a matrix that are orthogonalised on their own.

    sizes: Sizes of the blocks along its longer side; along its rows if it is square.
    """
    rows, columns = shape
    every = slice(None)
    along = [slice(begin, end) for begin, end in pairwise([0, *accumulate(sizes)])]
    return [(part, every) if rows >= columns else (every, part) for part in along]


def step_length(shape: Sequence[int]) -> float:
    """The singular values of the step on a matrix, or on a block of one, at a learning rate of 1.

    With them the step has the root mean square of AdamW's (arXiv 2502.16982).
    """
    return 0.2 * math.sqrt(max(shape))


def orthogonal(stack: Tensor) -> Tensor:
    """Matrices with the same directions and singular values near 1, by Newton-Schulz steps.

    stack: Matrices (number, rows, columns), in the data type to compute in.
    """
    wide = stack.mT if stack.size(1) > stack.size(2) else stack
    result: Tensor = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=LEAST_NORM)
    a, b, c = QUINTIC
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = result @ result.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    return result.mT if stack.size(1) > stack.size(2) else result
