"""Code that the inner optimizers share: checks of their settings, and groups of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adloco.errors import require

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_rates(*, lr: float, weight_decay: float) -> None:
    """Raise ValueError for a learning rate or a weight decay that is out of range."""
    require(lr > 0, f"lr must be > 0, got {lr}")
    require(weight_decay >= 0, f"weight_decay must be >= 0, got {weight_decay}")


def check_momentum(momentum: float) -> None:
    """Raise ValueError for a momentum that is out of range."""
    require(0 <= momentum < 1, f"momentum must be in [0, 1), got {momentum}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError for averaging coefficients of AdamW that are out of range."""
    in_range = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    require(in_range, f"betas must be two numbers in [0, 1), got {betas}")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, in the model's order."""
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def decay_groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for torch: matrices with weight decay, then vectors (norms, biases) without.

    A group without parameters is left out.
    """
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
