"""Squared norms, clipping, and |g_j|^2 of each micro-batch j during its backward pass.

A hook on each parameter receives the incoming gradient before it is added to `.grad`, once per
backward pass and after all uses of a tied weight have been summed. So |g_j|^2 is measured with few
gradients beside the accumulated ones (`SQUARED_AT_ONCE`). Sums are in float64. On shards no hook
sees a whole gradient; `fsdp.py` measures there, with the sums of this module.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adloco.distributed.dtensor import local
from adloco.errors import require

SQUARED_AT_ONCE = 2**24
"""Elements of kept gradients above which they are squared: 64 MiB in float32, and the last one."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients; tied ones are listed once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Sum of squares of all elements (of sharded tensors, those on this rank), in float64."""
    return float(squared_norm_on_device(list(tensors)))


def squared_norm_on_device(tensors: Sequence[Tensor]) -> Tensor:
    """`squared_norm` as a scalar on the tensors' device, which is not waited for."""
    return _total(squared_norms([local(tensor).detach() for tensor in tensors]))


@torch.no_grad()
def clip(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down so that their norm is at most max_norm; no device is waited for.

    norm: The norm that the gradients have now, a float64 scalar on their device.
    """
    if norm.device.type == "cpu" and norm <= max_norm:
        return  # It costs nothing to look there, and saves a pass over the gradients.
    factor = (max_norm / norm).clamp(max=1.0)
    own = [local(gradient) for gradient in gradients(parameters)]
    for gradient in own:
        if gradient.dtype.itemsize < 4:  # The factor itself would be rounded to the 8 bits of bf16.
            gradient.copy_(gradient.float() * factor)
    for dtype in {gradient.dtype for gradient in own if gradient.dtype.itemsize >= 4}:
        same = [gradient for gradient in own if gradient.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype))


class GradientSums:
    """Adds up numbers that are computed from incoming gradients."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._elements = 0
        self._seen: set[int] = set()

    def add(self, part: Tensor) -> None:
        """Add a scalar tensor, without waiting for its device."""
        self._parts.append(part)

    def add_square(self, index: int, gradient: Tensor) -> None:
        """Add |g|^2 of a parameter's gradient. Several are squared at once, because on a GPU each
        call costs more than its arithmetic.

        Raises:
            ValueError: The parameter had another part of its gradient since the last `take`, whose
                square alone says nothing.
        """
        require(
            index not in self._seen,
            "a parameter gets its gradient in parts, whose norm the test cannot take: from a block "
            "that is used twice under checkpoint(..., use_reentrant=True), where False is right, "
            "or from several backward passes, for instance torch.autograd.grad in the loss",
        )
        self._seen.add(index)
        self._kept.append(gradient)
        self._elements += gradient.numel()
        if self._elements > SQUARED_AT_ONCE:
            self._square()

    def take(self) -> Tensor:
        """The sum since the last call, a float64 scalar on the device. Each pass is followed by a
        call.
        """
        self._square()
        total = _total(self._parts)
        self.drop()
        return total

    def drop(self) -> None:
        """Forget what was added since the last call of `take`."""
        self._parts, self._kept, self._elements, self._seen = [], [], 0, set()

    def _square(self) -> None:
        self._parts += squared_norms(self._kept)
        self._kept, self._elements = [], 0


@contextmanager
def incoming_gradients(parameters: Sequence[Tensor]) -> Iterator[GradientSums]:
    """Sum |g|^2 of every incoming gradient of these parameters while open."""
    sums = GradientSums()
    with watched(parameters, sums.add_square):
        yield sums


@contextmanager
def watched(parameters: Sequence[Tensor], see: Callable[[int, Tensor], object]) -> Iterator[None]:
    """Call a function with each parameter's index and incoming gradient while open."""

    def hook(index: int, gradient: Tensor) -> None:
        see(index, gradient.detach())

    handles = [
        parameter.register_hook(functools.partial(hook, index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def squared_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Sum of squares of each tensor, as float64 scalars on their device, in few calls."""
    require(
        all(tensor.layout == torch.strided for tensor in tensors),
        "a parameter has a sparse gradient, whose norm is not known; build its embedding with "
        "sparse=False",
    )
    if not tensors:
        return []
    return [*torch._foreach_pow(torch._foreach_norm(tensors, 2, torch.float64), 2)]


def _total(parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack(list(parts)).sum()
