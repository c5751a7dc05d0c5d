"""AdamW as an inner optimizer (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.algorithms.inner.shared import check_betas, check_rates, decay_groups, trainable
from adloco.errors import require, require_setting
from adloco.late import torch
from adloco.setting import setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class InnerAdamW:
    """AdamW on all parameters of a worker. Its state persists across rounds.

    The state has the data type of the parameters; in bf16 and fp16 what rounding takes off a step
    is part of it, and added to the next one. In float16, the squares of gradients below about 1e-3
    lose their digits or become zero, so keep parameters in float32 or bfloat16.
    """

    key: ClassVar[str] = "adamw"

    lr: float = setting(2e-3, resume="recorded", aliases=("inner_lr", "learning_rate"))
    """Learning rate at a factor of 1; a schedule multiplies it by its factor."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; vectors (norms, biases) are never decayed."""
    betas: tuple[float, float] = setting((0.9, 0.95), aliases=("beta1",))
    """Averaging coefficients of the gradient and of its square."""

    def __post_init__(self) -> None:
        check_rates(self)
        check_betas(self)

    def __call__(self, model: nn.Module) -> list[Optimizer]:
        return [self.build(list(trainable(model).values()))]

    def build(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Build torch's AdamW over these parameters, with matrices and vectors in two groups.

        Raises:
            ValueError: A parameter's values are not side by side in memory, or a moving average
                is too slow for parameters of two bytes.
        """
        from adloco.algorithms.short_types import SLOWEST_MEAN, ShortAdamW, is_short
        from adloco.distributed.dtensor import local  # Torch takes seconds to import.

        for own in map(local, parameters):
            require(
                own.stride() == torch.empty_like(own, device="meta").stride(),
                f"a parameter of shape {tuple(own.shape)} has gaps in memory, where torch's fused "
                "AdamW takes wrong steps; make it with .contiguous()",
            )
        groups = decay_groups(parameters, self.weight_decay)
        short = any(map(is_short, parameters))
        require_setting(
            not short or max(self.betas) <= SLOWEST_MEAN,
            self,
            "betas",
            f"(inner.betas) must be <= {SLOWEST_MEAN} for parameters of two bytes, where slower "
            "means stand still",
        )
        kind = ShortAdamW if short else torch.optim.AdamW
        # The fused kernel takes one pass over memory instead of one for each term.
        return kind(groups, lr=self.lr, betas=self.betas, fused=True)
