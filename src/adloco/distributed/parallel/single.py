"""A worker's model on one rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from adloco.distributed.parallel.gradient_norms import (
    Block,
    GradientSums,
    Transform,
    added_gradients,
    gradients,
    gram,
    incoming_gradients,
    squared_norm,
    trainable,
)
from adloco.distributed.parallel.layers import Fill, fill_whole
from adloco.distributed.parallel.whole_matrices import MatrixOwners
from adloco.distributed.traffic import Traffic


class SingleDevice:
    """The whole model on one rank."""

    rank = 0
    replicas = 1

    def __init__(
        self, model: nn.Module, device: torch.device, compile: bool, fill: Fill | None
    ) -> None:
        if fill:
            fill_whole(model, fill)
        model.to(device)
        self.forward: Callable[..., Any] = torch.compile(model) if compile else model
        self.owners = MatrixOwners(Traffic())
        self._parameters = trainable(model)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def incoming(
        self, reference: Sequence[Tensor | None] | None = None
    ) -> AbstractContextManager[GradientSums]:
        return incoming_gradients(self._parameters, reference)

    def adding(
        self, totals: Sequence[Tensor], transform: Transform
    ) -> AbstractContextManager[None]:
        return added_gradients(self._parameters, totals, transform)

    def gram_part(self, matrix: Tensor, block: Block) -> Tensor:
        return gram(matrix[block])

    def norm_sq_part(self) -> float:
        return squared_norm(gradients(self._parameters))

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def average(self, buffers: Sequence[Tensor]) -> None:
        return

    def after_evaluation(self) -> None:
        return
