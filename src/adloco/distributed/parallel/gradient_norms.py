"""Squared norms, clipping, and statistics of the gradient of each micro-batch as it arrives.

A hook on each parameter sees the incoming gradient before it is added to `.grad`, once per backward
pass and after all uses of a tied weight have been summed. So |g_j|^2 of every micro-batch is known
without a second copy of the gradients. Sums are in float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adloco.distributed.dtensor import local


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that take gradients, tied ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of squares of all elements (of sharded tensors, those on this rank), in float64."""
    shards = [local(tensor).detach() for tensor in tensors]
    return (
        _total(torch._foreach_pow(torch._foreach_norm(shards, 2, torch.float64), 2))
        if shards
        else 0.0
    )


@torch.no_grad()
def clip(parameters: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients, whose norm is `norm`, down to max_norm at most."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / norm)


def squares(tensor: Tensor) -> Tensor:
    """Sum of squares as a float64 scalar, still on the device."""
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm.square()


class GradientSums:
    """Numbers from gradients as they come in; `take` returns their sum since the last call, as
    float64.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        self._parts.append(part)

    def take(self) -> float:
        total, self._parts = _total(self._parts), []
        return total


@contextmanager
def incoming_gradients(
    parameters: Sequence[Tensor], reference: Sequence[Tensor | None] | None = None
) -> Iterator[GradientSums]:
    """While open, sums |g|^2 of every incoming gradient, or with `reference` <g, reference>, over
    all these parameters (None in it: zero).
    """
    sums = GradientSums()
    references = reference or [None] * len(parameters)
    handles = [
        parameter.register_hook(_hook(sums, other))  # type: ignore[no-untyped-call]
        for parameter, other in zip(parameters, references, strict=True)
        if reference is None or other is not None
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def added_gradients(parameters: Sequence[Tensor], totals: Sequence[Tensor]) -> Iterator[None]:
    """While open, adds every incoming gradient to the total of its parameter too."""
    handles = [
        parameter.register_hook(_adder(total))  # type: ignore[no-untyped-call]
        for parameter, total in zip(parameters, totals, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        total.add_(gradient.detach())

    return add


def _hook(sums: GradientSums, reference: Tensor | None) -> Callable[[Tensor], None]:
    return lambda gradient: sums.add(
        squares(gradient) if reference is None else _inner(gradient, reference)
    )


def _total(parts: Sequence[Tensor]) -> float:
    # One transfer from the device, not one per tensor.
    return float(torch.stack(list(parts)).sum()) if parts else 0.0


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return (left.detach().double() * right.detach().double()).sum()
