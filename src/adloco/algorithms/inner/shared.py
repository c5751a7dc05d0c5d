"""Code that the inner optimizers share: checks of their settings, and groups of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adloco.errors import require_range, require_setting

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_rates(inner: Any) -> None:
    """Raise SettingError for a learning rate or a weight decay that is out of range."""
    require_range(inner, "lr", above=0)
    require_range(inner, "weight_decay", at_least=0)


def check_betas(inner: Any) -> None:
    """Raise SettingError for averaging coefficients of AdamW that are out of range."""
    in_range = len(inner.betas) == 2 and all(0 <= beta < 1 for beta in inner.betas)
    require_setting(in_range, inner, "betas", "must be two numbers in [0, 1)")


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
