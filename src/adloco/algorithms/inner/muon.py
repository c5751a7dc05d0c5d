"""Muon as an inner optimizer, scaled as in Moonlight (arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.algorithms.inner.shared import check_betas, check_rates, trainable
from adloco.errors import SettingError, require, require_range, require_setting
from adloco.setting import setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class InnerMuon:
    """Muon on the hidden matrices of a worker, AdamW on the rest. State persists across rounds."""

    key: ClassVar[str] = "muon"

    lr: float = setting(8e-3, resume="recorded", aliases=("inner_lr", "learning_rate"))
    """Learning rate of Muon at a factor of 1; a schedule multiplies it by its factor."""
    adamw_ratio: float = setting(1.0, resume="recorded")
    """AdamW's learning rate, on embeddings, output layer and vectors, as a multiple of Muon's."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; vectors (norms, biases) are never decayed."""
    momentum: float = 0.9
    """Muon's momentum: the share of the old one in the new one."""
    betas: tuple[float, float] = setting((0.9, 0.95), aliases=("beta1",))
    """AdamW's averaging coefficients of the gradient and of its square."""
    exclude: tuple[str, ...] = ("embed", "lm_head", "classifier", "score")
    """AdamW takes matrices whose name contains one of these, and whatever their names those of
    nn.Embedding and of the output layer that a model of transformers names."""
    split: Mapping[str, Any] = field(default_factory=dict)
    """Matrices whose name contains a key consist of blocks along their longer side, which are
    orthogonalised on their own: the number of equal blocks, or their sizes, for instance
    { c_attn = 3 } or { qkv_proj = [1024, 256, 256] }."""

    def __post_init__(self) -> None:
        check_rates(self)
        require_range(self, "adamw_ratio", above=0)
        require_range(self, "momentum", at_least=0, below=1)
        check_betas(self)
        for name, blocks in self.split.items():
            sizes = blocks if isinstance(blocks, list | tuple) else [blocks]
            if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
                problem = f"must have a number of blocks, or a list of their sizes, got {name} = "
                raise SettingError(self, "split", f"{problem}{blocks!r}")

    def __call__(self, model: nn.Module) -> list[Optimizer]:
        named = trainable(model)
        outer = _outer_layers(model)
        hidden = {
            name: matrix
            for name, matrix in named.items()
            if matrix.ndim == 2
            and matrix.numel()
            and matrix not in outer
            and not any(p in name for p in self.exclude)
        }
        rest = [parameter for name, parameter in named.items() if name not in hidden]
        none = "Muon needs a model with hidden matrices, and this one has none"
        require(bool(hidden), f"{none}; use adamw")
        # They need torch, which settings do without.
        from adloco.algorithms.muon_step import Muon
        from adloco.algorithms.short_types import SLOWEST_MEAN, is_short

        require_setting(
            self.momentum <= SLOWEST_MEAN or not any(map(is_short, hidden.values())),
            self,
            "momentum",
            f"(inner.momentum) must be <= {SLOWEST_MEAN} for parameters of two bytes, where a "
            "slower mean stands still",
        )

        muon = Muon(
            self._groups(hidden), lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum
        )
        rate = self.adamw_ratio * self.lr
        adamw = InnerAdamW(lr=rate, weight_decay=self.weight_decay, betas=self.betas)
        return [muon, adamw.build(rest)] if rest else [muon]

    def _groups(self, hidden: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Groups for torch: the matrices that have the same blocks."""
        for part in self.split:
            found = any(part in name for name in hidden)
            require(found, f"inner.split names {part!r}, which is in the name of no hidden matrix")
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for name, matrix in hidden.items():
            groups.setdefault(self._blocks(name, max(matrix.shape)), []).append(matrix)
        return [{"params": group, "blocks": blocks} for blocks, group in groups.items()]

    def _blocks(self, name: str, side: int) -> tuple[int, ...]:
        """Sizes of the blocks of a matrix; empty if it is one block.

        side: Length of the matrix's longer side.
        """
        for part, given in self.split.items():
            if part in name:
                # More blocks than rows are refused below, as blocks of 0 rows.
                equal = isinstance(given, int)
                sizes = (side // given,) * min(given, side) if equal else tuple(given)
                require(
                    sum(sizes) == side,
                    f"inner.split of {name} must give blocks of {side} in all, got {part} = "
                    f"{given}",
                )
                return sizes
        return ()


def _outer_layers(model: nn.Module) -> set[Tensor]:
    """The matrices of embeddings, and of the output layer if a model says which one it is, which
    may be inside of a wrapper.
    """
    from torch.nn import Embedding

    layers: list[Any] = []
    for module in model.modules():
        layers.append(getattr(module, "get_output_embeddings", lambda: None)())
        if isinstance(module, Embedding):
            layers.append(module)
    return {layer.weight for layer in layers if hasattr(layer, "weight")}
