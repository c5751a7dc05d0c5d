"""SGD with momentum as an inner optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.algorithms.inner.shared import check_rates, decay_groups, trainable
from adloco.errors import require, require_range
from adloco.late import torch
from adloco.setting import setting

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class InnerSGD:
    """SGD on all parameters of a worker. Its momentum persists across rounds."""

    key: ClassVar[str] = "sgd"

    lr: float = setting(2e-3, resume="recorded", aliases=("inner_lr", "learning_rate"))
    """Learning rate at a factor of 1; a schedule multiplies it by its factor."""
    weight_decay: float = 0.1
    """Weight of the L2 term that is added to the gradients of matrices; vectors (norms, biases) are
    never decayed."""
    momentum: float = 0.9
    """Momentum; 0 for plain SGD."""

    def __post_init__(self) -> None:
        check_rates(self)
        require_range(self, "momentum", at_least=0, below=1)

    def __call__(self, model: nn.Module) -> list[Optimizer]:
        from adloco.algorithms.short_types import is_short  # Torch takes seconds to import.

        parameters = list(trainable(model).values())
        require(
            not any(map(is_short, parameters)),
            "inner.optimizer sgd must have parameters of four bytes or more, because shorter ones "
            "round its steps away; set model.dtype to fp32, or take adamw or muon",
        )
        groups = decay_groups(parameters, self.weight_decay)
        return [torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)]
