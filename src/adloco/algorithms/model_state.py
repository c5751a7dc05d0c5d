"""The tensors of a model that syncs, merges and checkpoints read and write."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.inner.shared import trainable
from adloco.algorithms.method import OuterMemory
from adloco.algorithms.muon_step import Muon
from adloco.algorithms.short_types import ShortAdamW
from adloco.distributed.dtensor import in_memory_of, local, scattered, zeros_like
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.parallel.layers import repeats
from adloco.distributed.plain_state import split_state
from adloco.errors import NonFiniteLossError, require

LARGEST = 1e37
"""Parameters with this norm or a larger one count as infinite, because sums and differences of such
float32 numbers could overflow.
"""
ADAMS = torch.optim.Adam, torch.optim.AdamW, ShortAdamW
ADVICE = "lower the learning rate or check the data"
"""Advice in messages about a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The live tensors of one worker's model that syncs read and write."""

    names: Sequence[str]
    """Names of the parameters."""
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

        Args:
            model: The worker's model.
            residuals_in: Place of residuals, which are zero; None: there are none.
        """
        params = trainable(model)
        for name, parameter in params.items():
            require(
                not parameter.is_complex(),
                f"parameter {name} is complex, and syncs send real numbers; keep its real and its "
                "imaginary part as two parameters (torch.complex joins them in a pass)",
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
        states = [state for optimizer in optimizers for state in _float_states(optimizer)]
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


def all_tensors(model: nn.Module) -> list[Tensor]:
    """Every parameter and every buffer of the model's state, frozen and integer ones included."""
    return [
        *model.parameters(),
        *state_buffers(model, floating=True),
        *state_buffers(model, floating=False),
    ]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """State tensors of an optimizer, ordered by its parameters and then by their names; also those
    in lists, as Shampoo has them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [
        tensor
        for state in states
        for key in sorted(state)
        for tensor in split_state(state[key])[1].values()
    ]


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that had no gradient yet the state before a first step, zeros, as far as
    another parameter shows what it consists of.

    Raises:
        ValueError: The optimizer does not begin with zeros.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    # Of a parameter without dimensions a count of steps looks like a moment.
    known = [(owner, state) for owner, state in optimizer.state.items() if state and owner.ndim]
    if not (missing and known):
        return
    require(
        begins_with_zeros(optimizer),
        f"the states of {type(optimizer).__name__} cannot be averaged where some parameters had no "
        "gradient yet; set merge.inner_state keep or reset",
    )
    owner, shown = known[0]
    for parameter in missing:
        optimizer.state[parameter] = {
            key: torch.zeros_like(parameter, dtype=value.dtype)
            if value.shape == owner.shape
            else torch.zeros_like(value)
            for key, value in shown.items()
            if isinstance(value, Tensor)
        }


def begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """True for SGD without dampening, Adam and Muon."""
    if isinstance(optimizer, torch.optim.SGD):
        return not any(group["dampening"] for group in optimizer.param_groups)
    return type(optimizer) in (*ADAMS, Muon)


def _float_states(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, name, tensor) of an optimizer's floating-point state.

    Counts of steps that are kept in host memory are left out.
    """
    return [
        (parameter, key, value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device == parameter.device
    ]


@torch.no_grad()
def copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy each source into its target, in place.

    Values are converted to the target's data type. A whole source is sharded like its target.
    """
    for source, target in zip(sources, targets, strict=True):
        if source.is_floating_point() and not target.is_floating_point():
            source = source.round()  # A mean of counts may be a rounding below their number.
        target.copy_(in_memory_of(scattered(source, target), target))


@torch.no_grad()
def forget(optimizer: torch.optim.Optimizer) -> None:
    """Forget an optimizer's state: it goes on as if it began.

    Those that begin with zeros keep these, because a merge averages them with the states of others.
    """
    if not begins_with_zeros(optimizer):
        optimizer.state.clear()
    for tensor in optimizer_tensors(optimizer):
        tensor.zero_()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a copy of a saved state into an optimizer; an empty one makes it forget its own.

    The saved tensors are whole; each is sharded like its parameter.
    """
    if not saved["state"]:
        forget(optimizer)
        if type(optimizer) in (torch.optim.SGD, *ADAMS, Muon):  # Its groups have settings alone.
            return
    sizes, own_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    require(
        sizes == own_sizes,
        f"the inner or outer optimizer has groups of {own_sizes} parameters here and had {sizes} "
        "when the state was saved; resume it with the version of adloco that began it",
    )
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])

    def placed(value: Any, parameter: Tensor) -> Any:
        alike = isinstance(value, Tensor) and value.shape == parameter.shape
        return scattered(value, parameter) if alike else value

    states = dict(saved["state"])  # Some have an entry that belongs to no parameter.
    for index, parameter in enumerate(every):
        if index in states:
            entry = states[index].items()
            states[index] = {key: placed(value, parameter) for key, value in entry}
    groups = [
        was | {key: group[key] for key in _kept(optimizer, group, was)}
        for group, was in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    # A copy, because torch would otherwise use the given tensors as its state.
    optimizer.load_state_dict(copy.deepcopy({**saved, "state": states, "param_groups": groups}))
    # torch gives state the type of its parameter, which its own optimizers have but for counts.
    loaded = split_state(optimizer.state_dict()["state"])[1]
    for path, tensor in split_state(states)[1].items():
        exact = path in loaded and not (tensor.ndim and _is_known(optimizer))
        if exact and loaded[path].dtype != tensor.dtype:
            loaded[path].data = tensor.to(loaded[path].device, copy=True)


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer of torch or adloco."""
    return type(optimizer).__module__.startswith(("torch.", "adloco."))


def _kept(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], was: Mapping[str, Any]
) -> Iterable[str]:
    """The values of a group that an optimizer keeps when it loads a state.

    All of torch's and adloco's are settings, and the new ones count, unless a scheduler of torch's
    was attached to the saved optimizer. Others may count steps there, or change their rate. Which
    kernels work depends on the placement: fused ones cannot handle sharded tensors.
    """
    others = was.keys() - group.keys() - {"initial_lr"}
    require(
        not (others and group.keys() - was.keys()),
        f"the state is that of an optimizer with {', '.join(sorted(others))}, which "
        f"{type(optimizer).__name__} has not; load it into one of the same class",
    )
    kernels = {"fused", "foreach"} & group.keys()
    if "initial_lr" in was:
        return kernels
    # Of these, which decide what the state consists of, the old ones count.
    old = {"amsgrad", "centered"} | ({"momentum"} if "centered" in group else set())
    return group.keys() - {"params"} - old if _is_known(optimizer) else kernels
