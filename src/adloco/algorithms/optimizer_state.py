"""The states of optimizers: what merges average, checkpoints save, and resets forget."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from adloco.algorithms.muon_step import Muon
from adloco.algorithms.short_types import ShortAdamW
from adloco.distributed.dtensor import local, scattered
from adloco.distributed.plain_state import split_state
from adloco.errors import require

ADAMS = torch.optim.Adam, torch.optim.AdamW, ShortAdamW


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """State tensors of an optimizer, ordered by its parameters and then by their names; also those
    in lists, as Shampoo has them.
    """
    return [
        tensor
        for state in _states(optimizer).values()
        for key in sorted(state)
        for tensor in split_state(state[key])[1].values()
    ]


def state_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Number of elements in the state of each parameter."""
    return [
        sum(tensor.numel() for tensor in split_state(state)[1].values())
        for state in _states(optimizer).values()
    ]


def _states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter, empty before its first gradient."""
    # Some optimizers have an entry that belongs to no parameter.
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: optimizer.state.get(parameter, {}) for parameter in parameters}


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that had no gradient yet the state before a first step, if it is zeros and
    another parameter shows what it consists of.
    """
    states = _states(optimizer)
    missing = [parameter for parameter, state in states.items() if not state]
    # Of a parameter without dimensions a count of steps looks like a moment.
    known = [(owner, state) for owner, state in states.items() if state and owner.ndim]
    if not (known and begins_with_zeros(optimizer)):
        return
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


def float_states(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, name, tensor) of an optimizer's floating-point state, also of lists in it.

    Counts of steps that are kept in host memory are left out.

    Raises:
        ValueError: A tensor is of a class of its own, as torchao's quantised ones are.
    """
    found = [
        (parameter, key, tensor)
        for parameter, state in _states(optimizer).items()
        for key, value in state.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.device == parameter.device
    ]
    for _, key, tensor in found:
        kind = type(local(tensor))
        require(
            kind in (Tensor, torch.nn.Parameter),
            f"the state {key} of {type(optimizer).__name__} is of the class {kind.__name__}, which "
            "merges and checkpoints cannot read; take an optimizer whose state is plain tensors",
        )
    return found


@torch.no_grad()
def forget(optimizer: torch.optim.Optimizer) -> None:
    """Forget an optimizer's state: it goes on as if it began.

    Those that begin with zeros keep these, because a merge averages them with the states of others.
    """
    if not begins_with_zeros(optimizer):
        optimizer.state.clear()
    for tensor in optimizer_tensors(optimizer):
        tensor.zero_()


def saved_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, for `load_optimizer`, with the number of its entries."""
    state = optimizer.state_dict()
    require(
        {"state", "param_groups"} <= state.keys(),
        f"the state_dict() of {type(optimizer).__name__} lacks the state and param_groups of "
        "torch's optimizers, so it cannot be saved; take the optimizer that it wraps, or add them",
    )
    return {**state, "entries": len(state["state"])}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a copy of a saved state into an optimizer; an empty one makes it forget its own.

    The saved tensors are whole; each is sharded like its parameter.

    Raises:
        ValueError: It is that of another optimizer, or not complete.
    """
    require(
        saved.get("entries", 0) <= len(saved["state"]),
        f"the state has lost that of {type(optimizer).__name__}: torch.distributed.checkpoint "
        "loads no more than a new object has; save the state by torch.save, in a file of each rank",
    )
    if not saved["state"]:
        forget(optimizer)
        if type(optimizer) in (torch.optim.SGD, *ADAMS, Muon):  # Its groups have settings alone.
            return
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    require(
        sizes == own_sizes,
        f"the inner or outer optimizer has groups of {own_sizes} parameters here and had {sizes} "
        "when the state was saved; resume it with the version of adloco that began it",
    )

    def placed(value: Any, parameter: Tensor) -> Any:
        alike = isinstance(value, Tensor) and value.shape == parameter.shape
        return scattered(value, parameter) if alike else value

    states = dict(saved["state"])
    for index, parameter in enumerate(_states(optimizer)):
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
