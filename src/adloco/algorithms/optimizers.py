"""Protocols of inner and outer optimizers, and the outer optimizer by its name in torch.optim."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from adloco.errors import SettingError, require, require_range, require_setting
from adloco.late import torch
from adloco.setting import setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class InnerFactory(Protocol):
    """Builds a worker's inner optimizer, or several that together cover every trainable parameter
    once.
    """

    def __call__(self, model: nn.Module, /) -> Optimizer | Sequence[Optimizer]: ...


class OuterFactory(Protocol):
    """Builds a trainer's outer optimizer over its global parameters."""

    def __call__(self, parameters: Sequence[Tensor], /) -> Optimizer: ...


def require_all(
    optimizers: Iterable[Optimizer], names: Sequence[str], parameters: Sequence[Tensor], what: str
) -> None:
    """Raise ValueError unless each parameter is in one group of one optimizer.

    what: `inner` or `outer`, for the message.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    times = Counter(id(parameter) for group in groups for parameter in group["params"])
    for name, parameter in zip(names, parameters, strict=True):
        require(
            times[id(parameter)] == 1,
            f"{what} must give each trainable parameter to one optimizer, once, and gives {name} "
            f"{times[id(parameter)]} times",
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """True if a step needs a function that computes the loss again, as one of LBFGS does."""
    # The one of the class: a scheduler of torch puts a function with `self` in its place.
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    return any(
        each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments
    )


ELEMENTWISE = (
    *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop"),
)
"""Optimizers of torch that update each element without the others of its tensor, so they compute
the same on shards as on whole tensors.
"""
FUSED = ("SGD", "Adam", "AdamW")
"""Optimizers of torch with fused kernels for CPUs and GPUs; Adagrad's in torch 2.9 is for CPUs."""


def check_shards(optimizers: Iterable[Optimizer], shards: int) -> None:
    """Raise ValueError for an optimizer that might compute something else on several shards."""
    from adloco.algorithms.muon_step import Muon  # It needs torch, which settings do without.
    from adloco.algorithms.short_types import ShortAdamW

    exact = {Muon, ShortAdamW, *(getattr(torch.optim, name) for name in ELEMENTWISE)}
    for optimizer in optimizers:
        require(
            shards == 1 or type(optimizer) in exact,
            f"{type(optimizer).__name__} is not known to work element by element, so {shards} "
            "shards might not train as one does; use placement.shard_size 1 (replicas are no "
            "problem), or an inner optimizer of adloco",
        )


@dataclass(frozen=True, kw_only=True)
class OuterMean:
    """The workers' mean becomes the global parameters."""

    key: ClassVar[str] = "mean"


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """Any optimizer of torch.optim applies the pseudo-gradient to the global parameters."""

    key: ClassVar[str] = "optimizer"

    optimizer: str = setting("SGD", aliases=("outer_optimizer",))
    """Name of a class in torch.optim."""
    lr: float = setting(0.7, aliases=("outer_lr",))
    """Outer learning rate; SGD with 1.0 and no momentum averages the workers (LocalSGD)."""
    options: Mapping[str, Any] = setting(
        factory=lambda: {"momentum": 0.9, "nesterov": True}, aliases=("momentum", "nesterov")
    )
    """Further arguments of the class, for instance { momentum = 0.9, nesterov = true }."""

    def __post_init__(self) -> None:
        require_range(self, "lr", above=0)
        if not self._is_usual():  # Other optimizers are tried, and importing torch takes seconds.
            self._try()

    def _is_usual(self) -> bool:
        """True for SGD with nothing but a usual momentum, which torch accepts."""
        options = dict(self.options)
        momentum, nesterov = options.pop("momentum", 0.0), options.pop("nesterov", False)
        return (
            self.optimizer == "SGD"
            and not options
            and isinstance(momentum, float)
            and 0 <= momentum < 1
            and (nesterov is False or (nesterov is True and momentum > 0))
        )

    def _try(self) -> None:
        """Raise ValueError unless torch has the optimizer and it can take a step."""
        kind, base = getattr(torch.optim, self.optimizer, None), torch.optim.Optimizer
        known = isinstance(kind, type) and issubclass(kind, base) and kind is not base
        require_setting(
            known, self, "optimizer", "must name an optimizer of torch.optim such as SGD or Adam"
        )
        parameters = [
            torch.nn.Parameter(torch.zeros(size, device="cpu")) for size in ((2, 2), (2,))
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            tried = self(parameters)
            for _ in range(2):  # The first one has no momentum yet.
                tried.step()
        except (TypeError, ValueError, RuntimeError) as error:
            problem = f"do not fit torch.optim.{self.optimizer}, or it cannot be an outer optimizer"
            raise SettingError(self, "options", f"{problem}: {error}") from error
        finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
        require_setting(finite, self, "options", "must give finite steps")

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        from adloco.algorithms.short_types import is_short  # Torch takes seconds to import.
        from adloco.distributed.dtensor import is_sharded

        options = dict(self.options)
        chosen = {"fused", "foreach"} & options.keys()
        # Fused kernels cannot handle sharded tensors. Ours have four bytes or more; those that a
        # class of one's own hands in may have two, and torch 2.13's fused SGD on a CPU leaves most
        # of their values unchanged (https://github.com/pytorch/pytorch/issues/191763).
        plain = not any(is_sharded(each) or is_short(each) for each in parameters)
        if self.optimizer in FUSED and not chosen and plain:
            # The fused kernel takes one pass over memory instead of one for each term. On a fast
            # link, memory is what limits a sync.
            options["fused"] = True
        optimizer: Optimizer = getattr(torch.optim, self.optimizer)(
            parameters, lr=self.lr, **options
        )
        return optimizer
