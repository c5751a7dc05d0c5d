"""Inner and outer optimizers by name, all of them from torch.optim."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adloco.distributed.dtensor import is_sharded
from adloco.errors import require

InnerFactory = Callable[[nn.Module], Sequence[Optimizer]]
"""Builds a worker's optimizers, which together cover every trainable parameter once."""

OuterFactory = Callable[[Sequence[Tensor]], Optimizer]
"""Builds a trainer's outer optimizer over its global parameters."""


ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.ASGD,
)  # fmt: skip
"""Optimizers whose update of an element needs nothing else of its tensor, so that they do the same on shards."""


def check_shards(optimizers: Iterable[Optimizer], shards: int) -> None:
    """Refuse what cannot be the same over several shards."""
    for optimizer in optimizers:
        known = f"{type(optimizer).__name__} is not known to work element by element, so {shards} shards might not train as one does"
        advice = "use placement.shard_size 1 (replicas are no problem), or an optimizer such as AdamW"
        require(shards == 1 or type(optimizer) in ELEMENTWISE, f"{known}; {advice}")


@dataclass(frozen=True, kw_only=True)
class InnerOptimizer:
    """The optimizer of each worker. Its state persists across rounds."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw, sgd, or muon: Muon on the hidden matrices and AdamW on the rest."""
    lr: float = 2e-3
    """Learning rate; a schedule multiplies it with its factor."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; vectors (norms, biases) are never decayed. For sgd, an L2 term."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging coefficients."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    muon_exclude: tuple[str, ...] = ("embed", "lm_head")
    """Matrices whose name contains one of these stay with AdamW: embeddings and the output head."""

    def __post_init__(self) -> None:
        require(self.optimizer in ("adamw", "sgd", "muon"), f"inner.optimizer must be adamw, sgd or muon, got {self.optimizer!r}")
        require(self.lr > 0, f"inner.lr must be > 0, got {self.lr}")
        require(self.weight_decay >= 0, f"inner.weight_decay must be >= 0, got {self.weight_decay}")
        require(len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), f"inner.betas must be two numbers in [0, 1), got {self.betas}")
        require(0 <= self.momentum < 1, f"inner.momentum must be in [0, 1), got {self.momentum}")

    def __call__(self, model: nn.Module) -> list[Optimizer]:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            groups = _decay_groups([parameter for _, parameter in named], self.weight_decay)
            return [torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)]
        if self.optimizer == "adamw":
            return [self._adamw([parameter for _, parameter in named])]
        matrices = [parameter for name, parameter in named if self._for_muon(name, parameter)]
        rest = [parameter for name, parameter in named if not self._for_muon(name, parameter)]
        require(bool(matrices), "inner.optimizer muon needs a model with hidden matrices, and this one has none; use adamw")
        # match_rms_adamw lets both optimizers share one learning rate (Moonlight, arXiv 2502.16982).
        muon = torch.optim.Muon(matrices, lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum, adjust_lr_fn="match_rms_adamw")
        return [muon, self._adamw(rest)] if rest else [muon]

    def _for_muon(self, name: str, parameter: Tensor) -> bool:
        return parameter.ndim == 2 and not any(part in name for part in self.muon_exclude)

    def _adamw(self, parameters: Sequence[Tensor]) -> Optimizer:
        return torch.optim.AdamW(_decay_groups(parameters, self.weight_decay), lr=self.lr, betas=self.betas, fused=True)


def _decay_groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """The optimizer that applies the pseudo-gradient to a trainer's global parameters: any of torch.optim, by name."""

    optimizer: str = "SGD"
    """Name of a class in torch.optim."""
    lr: float = 0.7
    """Outer learning rate; SGD with 1.0 and no momentum averages the workers (LocalSGD)."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"momentum": 0.9, "nesterov": True})
    """Further arguments of that class, for instance { momentum = 0.9, nesterov = true }."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"outer.lr must be > 0, got {self.lr}")
        kind = getattr(torch.optim, self.optimizer, None)
        known = isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
        require(known, f"outer.optimizer must name an optimizer of torch.optim such as SGD or Adam, got {self.optimizer!r}")
        parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            self(parameters).step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"outer.options do not fit torch.optim.{self.optimizer}, or it cannot serve outside: {error}") from error

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        kind = getattr(torch.optim, self.optimizer)
        options = dict(self.options)
        if "fused" in inspect.signature(kind).parameters and not {"fused", "foreach"} & options.keys() and not any(map(is_sharded, parameters)):
            # One pass over memory instead of one for each term: a sync is bound by memory where the link is fast.
            options["fused"] = True
        optimizer: Optimizer = kind(parameters, lr=self.lr, **options)
        return optimizer
