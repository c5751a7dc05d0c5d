"""The tensors of a model that syncs, merges and checkpoints read and write."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adloco.algorithms.inner.shared import trainable
from adloco.algorithms.method import OuterMemory
from adloco.algorithms.optimizer_state import float_states
from adloco.distributed.dtensor import in_memory_of, local, scattered, zeros_like
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.parallel.layers import plain_parts, repeats, written_tensors
from adloco.errors import NonFiniteLossError, require

LARGEST = 1e37
"""Parameters with this norm or a larger one count as infinite, because sums and differences of such
float32 numbers could overflow.
"""
FEW = 16
"""Values of a frozen parameter that are compared: what follows the weights changes them all."""
ADVICE = "lower the learning rate or check the data"
"""Advice in messages about a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The live tensors of one worker's model that syncs read and write."""

    names: Sequence[str]
    params: Sequence[Tensor]
    """The trainable parameters."""
    buffers: Iterable[Tensor]
    """The floating-point buffers of the model's state (running statistics), averaged at a sync:
    those that it has when they are asked for."""
    residuals: Sequence[Tensor]
    """The part of each parameter's differences that no sync has sent yet: float32 tensors of the
    parameters' shapes. Empty without error feedback.
    """

    @staticmethod
    def of(model: nn.Module, residuals_in: OuterMemory | None = None) -> "Replica":
        """The replica of a model.

        residuals_in: Place of residuals, which are zero; None: there are none.
        """
        params = trainable(model)
        for name, parameter in params.items():
            require(
                not parameter.is_complex(),
                f"parameter {name} is complex, and syncs send real numbers; keep its real and its "
                "imaginary part as two parameters (torch.complex joins them in a pass)",
            )
            require(
                all(each.is_floating_point() for _, each in plain_parts(name, parameter)),
                f"parameter {name} is quantised ({type(parameter).__name__}), and syncs cannot "
                "average its whole numbers; let it be trained as floating-point numbers, or freeze "
                "it",
            )
        return Replica(
            names=[*params],
            params=[*params.values()],
            buffers=state_buffers(model, floating=True),
            residuals=[
                zeros_like(each, torch.float32, device=residuals_in.place(local(each).device))
                for each in params.values()
            ]
            if residuals_in
            else [],
        )

    def require_finite(
        self,
        where: str,
        add_up: Callable[[Sequence[float]], list[float]] = list,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Raise NonFiniteLossError, with the parameter's name, unless all parameters are finite.

        Args:
            where: Trainer, worker and inner step, for the message.
            add_up: Sums numbers over the ranks that have parts of the parameters.
            optimizers: Optimizers of these parameters, whose state must be finite too.
        """
        states = [state for optimizer in optimizers for state in float_states(optimizer)]
        norm_sq, state_sq = add_up(
            [squared_norm(self.params), squared_norm(tensor for _, _, tensor in states)]
        )
        if norm_sq < LARGEST**2 and math.isfinite(state_sq):
            return
        # Which one it is costs a reduction of many numbers, so it is asked only now.
        names = dict(zip(self.params, self.names, strict=True))
        most = LARGEST**2 / len(names)
        named = [(f"parameter {name}", parameter, most) for parameter, name in names.items()]
        named += [
            (f"optimizer state {key} of parameter {names[parameter]}", tensor, math.inf)
            for parameter, key, tensor in states
        ]
        squares = add_up([squared_norm([tensor]) for _, tensor, _ in named])
        what = next(
            what
            for (what, _, limit), square in zip(named, squares, strict=True)
            if not square < limit
        )
        raise NonFiniteLossError(f"{what} is not finite in {where}; {ADVICE}")


@dataclass(frozen=True)
class Buffers:
    """Buffers of a model, by the modules that have them: a forward pass may put another tensor in
    the place of one.
    """

    places: Sequence[tuple[nn.Module, str]]
    """The module and the name of each, which is not in the names of wrappers."""

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(module, name) for module, name in self.places)


def state_buffers(model: nn.Module, *, floating: bool) -> Buffers:
    """The buffers of the model's state that are floating-point (running statistics), or the others.

    The others, such as counts of batches, are each worker's own: they are saved, but not averaged.
    """
    places: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        # Not by the names of state_dict(), from which wrappers take out their own part.
        left_out = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in left_out and buffer.is_floating_point() == floating:
                places.setdefault(id(buffer), (module, name))
    return Buffers([*places.values()])


def frozen_bytes(model: nn.Module, trained: Set[str]) -> Tensor:
    """A few bytes of each parameter but those `trained`, which show whether it has changed."""
    parts = [
        local(part).detach().flatten()[:FEW].contiguous().view(torch.uint8)
        for name, each in model.named_parameters()
        if name not in trained  # One that is frozen later is synced and saved like before.
        for _, part in plain_parts(name, each)
        if part.layout == torch.strided
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def check_memory(model: nn.Module) -> None:
    """Raise ValueError unless each element of the parameters and of the model's state has a place
    of its own in memory: shards and other devices would give it one, and one CPU would not.
    """
    buffers = [
        (f"{name} of a {type(each).__name__}", getattr(each, name))
        for floating in (True, False)
        for each, name in state_buffers(model, floating=floating).places
    ]
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *buffers]:
        require(
            tensor.layout != torch.strided or not repeats(tensor),
            f"{name} repeats values in memory, so nothing can be written into it; make it with "
            ".clone() or .contiguous(), or a buffer with persistent=False",
        )
        address = local(tensor).data_ptr() if isinstance(tensor, nn.Parameter) else 0
        other = first.setdefault(address, name) if address else name  # 0: without memory.
        require(
            other == name,
            f"the parameters {other} and {name} are two in one memory; tie them by assigning the "
            "parameter itself, not its data",
        )


def check_apart(models: Iterable[nn.Module]) -> None:
    """Raise ValueError if two workers' models share a trainable parameter, or its memory, as two
    calls of `nn.Embedding.from_pretrained` with one tensor do.
    """
    require(
        not share_memory(trainable(model).values() for model in models),
        "models of two workers have a trainable parameter in common, or two in one memory, so they "
        "could not train apart; give each worker a copy (copy.deepcopy, or .clone() of a tensor)",
    )


def check_filled(model: nn.Module) -> None:
    """Raise ValueError if parameters or buffers have no values."""
    empty = [name for name, each in written_tensors(model).items() if each.is_meta]
    require(
        not empty,
        f"a model has no values in {', '.join(empty)}: build it outside of torch.device('meta'), "
        "or fill it",
    )


def share_memory(groups: Iterable[Iterable[Tensor]]) -> bool:
    """True if a tensor of one group has the memory of a tensor of another group."""
    own = [{local(tensor).data_ptr() for tensor in group} - {0} for group in groups]  # 0: none.
    return len(set[int]().union(*own)) < sum(map(len, own))


@torch.no_grad()
def copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy each source into its target, in place.

    Values are converted to the target's data type. A whole source is sharded like its target.
    """
    for source, target in zip(sources, targets, strict=True):
        if source.is_floating_point() and not target.is_floating_point():
            source = source.round()  # A mean of counts may be a rounding below their number.
        target.copy_(in_memory_of(scattered(source, target), target))
