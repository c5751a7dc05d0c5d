"""Muon as an inner optimizer, scaled as in Moonlight (arXiv 2502.16982)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.algorithms.inner.shared import check_betas, check_momentum, check_rates, trainable
from adloco.errors import require

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class InnerMuon:
    """Muon on the hidden matrices of a worker, AdamW on the rest. State persists across rounds."""

    key: ClassVar[str] = "muon"

    lr: float = 2e-3
    """Learning rate of Muon and AdamW at a factor of 1; a schedule multiplies it by its factor."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; vectors (norms, biases) are never decayed."""
    momentum: float = 0.9
    """Muon's momentum."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging coefficients of the gradient and of its square."""
    exclude: tuple[str, ...] = ("embed", "lm_head")
    """AdamW takes matrices whose name contains one of these: embeddings and the output head."""

    def __post_init__(self) -> None:
        check_rates(lr=self.lr, weight_decay=self.weight_decay)
        check_momentum(self.momentum)
        check_betas(self.betas)

    def __call__(self, model: nn.Module) -> list[Optimizer]:
        named = trainable(model)
        hidden = {name: matrix for name, matrix in named.items() if self._is_hidden(name, matrix)}
        rest = [parameter for name, parameter in named.items() if name not in hidden]
        none = "Muon needs a model with hidden matrices, and this one has none"
        require(bool(hidden), f"{none}; use adamw")
        from adloco.algorithms.muon_step import Muon  # It needs torch, which settings do without.

        muon = Muon(
            hidden.values(), lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum
        )
        adamw = InnerAdamW(lr=self.lr, weight_decay=self.weight_decay, betas=self.betas)
        return [muon, adamw.build(rest)] if rest else [muon]

    def _is_hidden(self, name: str, parameter: Tensor) -> bool:
        return parameter.ndim == 2 and not any(part in name for part in self.exclude)
