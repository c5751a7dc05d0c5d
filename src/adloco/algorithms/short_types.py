"""Steps on parameters of less than four bytes (bf16, fp16) that rounding does not take away.

Near 1, neighbours in bf16 are 0.004 to 0.008 apart: steps of less than half of that would all be
rounded back. What rounding takes off a step is therefore kept beside the parameter, in its own
type, and added before the next step (Kahan, Communications of the ACM 8 (1965), 40). A sync leaves
it as it is: what the parameters could not say of a round, they say in a later one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from adloco.distributed.dtensor import converted, local

LOST = "lost"
"""Key in an optimizer's state of what rounding took off."""
SLOWEST_MEAN = 0.99
"""Largest weight of the past in a moving average that has a short type: slower ones stand still
before they arrive (after a fall, a mean of squares in bf16 ends 1.6 times too large with 0.99, 3.4
times with 0.995 and 107 times with 0.999)."""
SLICE = 2**24
"""Values that a step takes at once, for which it needs 16 bytes each."""
Slice = tuple[Tensor, ...]
"""A part of a parameter, of its gradient and of its moments; its count of steps; and, of a short
one, the part of what rounding took off it."""


def is_short(parameter: Tensor) -> bool:
    """True for a data type that needs this."""
    return parameter.dtype.itemsize < 4


def exact(parameters: list[Tensor], lost: list[Tensor]) -> list[Tensor]:
    """Copies of short parameters in float32, with what rounding took off them."""
    values = converted(parameters, torch.float32)
    torch._foreach_add_(values, lost)
    return values


def put(parameters: list[Tensor], lost: list[Tensor], values: list[Tensor]) -> None:
    """Round values in float32 into the parameters, and keep what that takes off."""
    torch._foreach_copy_(parameters, values)
    torch._foreach_sub_(values, parameters)
    torch._foreach_copy_(lost, values)


class ShortAdamW(torch.optim.AdamW):
    """torch's AdamW, with a step on short parameters that is computed in float32. The moments have
    the parameters' type. A model may have parameters of both kinds.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            for parameter in parameters:
                self._begin(parameter)
            if wide := [self._parts(each) for each in parameters if not is_short(each)]:
                own, gradients, first, second, steps = map(list, zip(*wide, strict=True))
                _adamw(group, own, gradients, first, second, steps)
            for slices in _batches([self._parts(each) for each in parameters if is_short(each)]):
                own, gradients, first, second, steps, lost = map(list, zip(*slices, strict=True))
                taken, means, squares = (
                    converted(each, torch.float32) for each in (gradients, first, second)
                )
                values = exact(own, lost)
                # adamw counts a step, and a parameter may be in several batches.
                _adamw(group, values, taken, means, squares, [step.clone() for step in steps])
                put(own, lost, values)
                torch._foreach_copy_(first, means)
                torch._foreach_copy_(second, squares)
            if counts := [self.state[each]["step"] for each in parameters if is_short(each)]:
                torch._foreach_add_(counts, 1)
        return loss

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq", *[LOST] * is_short(parameter)):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)

    def _parts(self, parameter: Tensor) -> Slice:
        state = self.state[parameter]
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        own = [local(each) for each in tensors if each is not None]
        return (*own, state["step"], *([local(state[LOST])] if is_short(parameter) else []))


def _adamw(
    group: dict[str, Any],
    values: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    adamw(
        values,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _batches(parameters: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Parameters together, and large ones in slices, of about `SLICE` values."""
    batch: list[Slice] = []
    values = 0
    for own, gradient, first, second, step, lost in parameters:
        tensors = (own, gradient, first, second, lost)
        side_by_side = all(each.is_contiguous() for each in tensors)
        cut = [torch.split(each.view(-1), SLICE) if side_by_side else [each] for each in tensors]
        for one, slope, mean, square, off in zip(*cut, strict=True):
            batch.append((one, slope, mean, square, step, off))
            values += one.numel()
            if values >= SLICE:
                yield batch
                batch, values = [], 0
    if batch:
        yield batch
