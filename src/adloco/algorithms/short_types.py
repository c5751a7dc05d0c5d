"""Steps on parameters of less than four bytes (bf16, fp16) that rounding does not take away.

Near 1, neighbours in bf16 are 0.004 to 0.008 apart: steps of less than half of that would all be
rounded back. What rounding takes off a step is therefore kept beside the parameter, in its own
type, and added before the next step (Kahan, Communications of the ACM 8 (1965), 40). A sync leaves
it as it is: what the parameters could not say of a round, they say in a later one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from adloco.distributed.dtensor import local

LOST = "lost"
"""Key in an optimizer's state of what rounding took off."""
SLOWEST_BETA = 0.995
"""Largest weight of the past in a mean of squares: a slower one stands still in bf16, whose
neighbours are up to 0.8% apart (with 0.999 it stayed at 107 times what it should be)."""


def is_short(parameter: Tensor) -> bool:
    """True for a data type that needs this."""
    return parameter.dtype.itemsize < 4


def exact(parameter: Tensor, lost: Tensor) -> Tensor:
    """A copy of the parameter in float32, with what rounding took off it."""
    return parameter.float().add_(lost)


def put(parameter: Tensor, lost: Tensor, value: Tensor) -> None:
    """Round a value in float32 into the parameter, and keep what that takes off."""
    parameter.copy_(value)
    lost.copy_(value.sub_(parameter))


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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, short = self.state[parameter], is_short(parameter)
        names = ["exp_avg", "exp_avg_sq", *[LOST] * short]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({name: torch.zeros_like(parameter) for name in names})
        own, (first, second, *lost) = local(parameter), (local(state[name]) for name in names)
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        wide = [each.float() if short else each for each in (gradient, first, second)]
        value = exact(own, lost[0]) if short else own
        adamw(
            [value],
            [wide[0]],
            [wide[1]],
            [wide[2]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if short:
            put(own, lost[0], value)
            first.copy_(wide[1])
            second.copy_(wide[2])
