"""Squared norms, clipping, and statistics of the gradient of each micro-batch as it arrives.

A hook on each parameter sees the incoming gradient before it is added to `.grad`, once per backward pass and after all uses of a tied weight have
been summed. So |g_j|^2 of every micro-batch is known without a second copy of the gradients. Sums are in float64.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of squares of all elements, in float64."""
    return _total([_squares(tensor) for tensor in tensors])


def clip(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Scale the gradients down so that their norm over all parameters is at most max_norm."""
    torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False)


class IncomingGradients:
    """While open, sums a quantity of every incoming gradient; `take` returns the sum since the last call.

    The quantity is |g|^2, or with `reference` <g, reference>, over all parameters that take gradients (None in the reference: zero).
    """

    def __init__(self, parameters: Sequence[Tensor], reference: Sequence[Tensor | None] | None = None) -> None:
        self._parameters = parameters
        self._reference = reference
        self._parts: list[Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "IncomingGradients":
        for index, parameter in enumerate(self._parameters):
            if self._reference is None or self._reference[index] is not None:
                self._handles.append(parameter.register_hook(self._hook(index)))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> float:
        """The sum over the gradients that came in since the last call, as float64."""
        total, self._parts = _total(self._parts), []
        return total

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        reference = None if self._reference is None else self._reference[index]

        def see(gradient: Tensor) -> None:
            self._parts.append(_squares(gradient) if reference is None else _inner(gradient, reference))

        return see


def _squares(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm.square()


def _total(parts: Sequence[Tensor]) -> float:
    # One transfer from the device, not one per tensor.
    return float(torch.stack(list(parts)).sum()) if parts else 0.0


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return (left.detach().double() * right.detach().double()).sum()
