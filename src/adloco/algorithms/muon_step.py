"""Muon whose orthogonalisation is computed in bf16 only where the device does so natively.

torch.optim.Muon always computes it in bf16. A CPU without instructions for that emulates it, which
took five sixths of the time of the default recipe (reproduce/LOG.md, 2026-11-23).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from adloco.distributed.device import native_bf16


class Muon(torch.optim.Muon):
    """torch.optim.Muon, with the same state; in float32 where bf16 would be emulated.

    Its steps have the root mean square of AdamW's (match_rms_adamw), so that one learning rate is
    right for both.
    """

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if native_bf16(self.param_groups[0]["params"][0].device):
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, momentum, lr = state["momentum_buffer"], group["momentum"], group["lr"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum)  # Nesterov's, as by default in torch.
        steps, coefficients, eps = group["ns_steps"], group["ns_coefficients"], group["eps"]
        direction = orthogonal(update.float(), steps, coefficients, eps)
        parameter.mul_(1 - lr * group["weight_decay"])
        # match_rms_adamw
        parameter.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(
    matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float
) -> Tensor:
    """The matrix with singular values near 1 and the same directions, by Newton-Schulz steps.

    Each step takes a singular value s to a s + b s^3 + c s^5 (Jordan et al., 2024, Muon).

    Args:
        matrix: Two dimensions; float32 or bf16, which it computes in.
        steps: Number of steps.
        coefficients: a, b and c.
        eps: The least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    result: Tensor = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.mT
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if matrix.size(0) > matrix.size(1) else result
