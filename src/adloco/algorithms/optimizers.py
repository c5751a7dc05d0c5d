"""Protocols of inner and outer optimizers, and the outer optimizer by its name in torch.optim."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adloco.distributed.dtensor import is_sharded
from adloco.errors import require


class InnerFactory(Protocol):
    """Builds a worker's inner optimizers, which together cover every trainable parameter once."""

    def __call__(self, model: nn.Module, /) -> Sequence[Optimizer]: ...


class OuterFactory(Protocol):
    """Builds a trainer's outer optimizer over its global parameters."""

    def __call__(self, parameters: Sequence[Tensor], /) -> Optimizer: ...


ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.ASGD,
)
"""Optimizers that update each element without the others of its tensor, so they compute the same on
shards as on whole tensors.
"""


def check_shards(optimizers: Iterable[Optimizer], shards: int) -> None:
    """Raise ValueError for an optimizer that might compute something else on several shards."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        known = (
            f"{name} is not known to work element by element, so {shards} shards might not train "
            "as one does"
        )
        advice = (
            "use placement.shard_size 1 (replicas are no problem), or an optimizer such as AdamW"
        )
        require(shards == 1 or type(optimizer) in ELEMENTWISE, f"{known}; {advice}")


@dataclass(frozen=True, kw_only=True)
class OuterMean:
    """The workers' mean becomes the global parameters."""

    key: ClassVar[str] = "mean"


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """Any optimizer of torch.optim applies the pseudo-gradient to the global parameters."""

    key: ClassVar[str] = "optimizer"

    optimizer: str = "SGD"
    """Name of a class in torch.optim."""
    lr: float = 0.7
    """Outer learning rate; SGD with 1.0 and no momentum averages the workers (LocalSGD)."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"momentum": 0.9, "nesterov": True})
    """Further arguments of the class, for instance { momentum = 0.9, nesterov = true }."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be > 0, got {self.lr}")
        kind = getattr(torch.optim, self.optimizer, None)
        known = isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
        require(
            known,
            "optimizer must name an optimizer of torch.optim such as SGD or Adam, got "
            f"{self.optimizer!r}",
        )
        parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            self(parameters).step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"options do not fit torch.optim.{self.optimizer}, or it cannot be an outer "
                f"optimizer: {error}"
            ) from error

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        kind = getattr(torch.optim, self.optimizer)
        options = dict(self.options)
        chosen = {"fused", "foreach"} & options.keys()
        if (
            "fused" in inspect.signature(kind).parameters
            and not chosen
            and _fused_is_right(kind, parameters)
        ):
            # The fused kernel takes one pass over memory instead of one for each term. On a fast
            # link, memory is what limits a sync.
            options["fused"] = True
        optimizer: Optimizer = kind(parameters, lr=self.lr, **options)
        return optimizer


def _fused_is_right(kind: type[Optimizer], parameters: Sequence[Tensor]) -> bool:
    """True if torch's fused kernel of this optimizer is correct for these parameters.

    Fused kernels cannot handle sharded tensors. On CPUs, torch 2.13's fused SGD updates only the
    last elements of float16 and bfloat16 tensors, those after the last full SIMD block.
    """
    if any(map(is_sharded, parameters)):
        return False
    half_on_cpu = any(
        tensor.device.type == "cpu" and tensor.dtype in (torch.float16, torch.bfloat16)
        for tensor in parameters
    )
    return not (kind is torch.optim.SGD and half_on_cpu)
