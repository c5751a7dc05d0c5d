"""Copies of a model for the workers of one process; ranks build theirs by themselves. `deepcopy`
does not copy hooks of parameters, nor functions, which would go on acting on the first model, and
fails for locks, generators and tensors that were computed (those of torch.nn.utils.weight_norm).
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from adloco.algorithms.model_state import copy_all
from adloco.distributed.parallel.layers import written_tensors
from adloco.errors import require


def copied_model(model: nn.Module, build_model: Callable[[], nn.Module]) -> nn.Module:
    """A model like this one for another worker of the process.

    Args:
        model: The model.
        build_model: Makes one like it, for where `deepcopy` fails or would leave out a part.

    Raises:
        ValueError: It gave the same model again.
    """
    if not _has_functions(model):
        with suppress(Exception):  # Parts of the model may raise anything.
            return _deep_copy(model)
    with torch.random.fork_rng(devices=[]):
        built = build_model()
    require(
        built is not model,
        "build_model must make a new model at each call, because this one has parts that cannot be "
        "copied, such as hooks and functions, and gave the same one again",
    )
    copy_all([*written_tensors(model).values()], [*written_tensors(built).values()])
    return built


def _deep_copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    require(
        all(parameter.is_leaf for parameter in copied.parameters()),
        "copies of a module of torch.jit cannot be trained",
    )
    # It leaves out the attributes of parameters.
    for own, parameter in zip(copied.parameters(), model.parameters(), strict=True):
        vars(own).update(vars(parameter))
    return copied


def _has_functions(model: nn.Module) -> bool:
    """True if hooks of parameters, or functions that modules have as attributes or hooks, may act
    on this very model.
    """
    return any(
        _holds_model(value) for each in model.modules() for value in vars(each).values()
    ) or any(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        for parameter in model.parameters()
    )


def _holds_model(value: object, within: bool = False, depth: int = 6) -> bool:
    """True if there is a function in a value that has modules or tensors besides its arguments:
    `deepcopy` does not copy functions.

    Args:
        value: Anything.
        within: True if a function has it.
        depth: How far to look.
    """
    parts: Iterable[object] = ()
    if isinstance(value, nn.Module | Tensor):
        return within
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        within = True
    elif isinstance(value, MethodType):
        parts = [value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    return depth > 0 and any(_holds_model(part, within, depth - 1) for part in parts)
