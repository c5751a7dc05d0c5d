"""Checks that the sections of a run fit together, and builds its workers."""

import copy
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Literal

import torch
from torch import Tensor, nn

from adloco.algorithms.dropout import uses_dropout
from adloco.algorithms.gradient_stats import measurement_of
from adloco.algorithms.method import Batching, Execution, Merging, Method, Problem, Syncing
from adloco.algorithms.model_state import copy_all
from adloco.algorithms.optimizers import InnerFactory
from adloco.algorithms.planning import check_groups
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.parallel.layers import written_buffers
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.learning_rate import LearningRate

COMPILED_FROM = 20_000_000
"""Parameters from which `auto` compiles a model. Compiling takes 20 to 60 seconds; on an H200, 305M
parameters trained 53% faster and 24M twice as fast (the loss is compiled, too)."""


def check_sections(
    problem: Problem,
    method: Method,
    batching: Batching,
    merging: Merging,
    learning_rate: LearningRate | None,
    placement: Placement,
) -> None:
    """Raise ValueError if the sections cannot work together on this placement."""
    streams = problem.data.num_streams
    require(
        streams >= method.num_workers,
        f"data has {streams} streams, but there are {method.num_workers} workers",
    )
    require(
        placement.shards == 1 or not measurement_of(batching.rule).whole_gradients,
        "this batch rule needs whole gradients; use the norm test, or one shard per worker",
    )
    check_groups(batching.rule, batching.switch, batching.test.groups, placement.ranks_per_worker)
    require(
        batching.test.step == "first" or not method.syncs(merging.policy),
        "test.step must be first where trainers have several workers, at the start or after a "
        "merge, because they differ on the last step",
    )
    schedule = learning_rate or LearningRate(shape="constant")
    falls = schedule.shape != "constant"
    require(
        not falls or schedule.total_tokens > 0,
        "learning_rate.total_tokens must be > 0 for this shape, got 0",
    )
    schedule.check_growth(method.sync_growth)
    # The rate then falls by sqrt(a) where the batch grows by 1/a, also after merges.
    coupled = schedule.reference_batch if schedule.coupling == "sqrt" else 0
    require(
        not isinstance(batching.rule, Seesaw)
        or (falls and coupled == batching.guards.initial >= method.num_workers),
        "batch.rule seesaw needs a learning rate that falls (shape cosine or wsd), "
        "learning_rate.coupling sqrt with reference_batch = batch.initial, and a batch.initial >= "
        f"the number of all workers; got {batching.guards.initial} for {method.num_workers}",
    )


def is_compiled(
    asked: bool | Literal["auto"], model: nn.Module, problem: Problem, placement: Placement
) -> bool:
    """True if the workers' models, which are like this one, are to be compiled.

    Args:
        asked: auto: large models that compiling is known to make faster, on a GPU that has the
            whole model.

    Raises:
        ValueError: It is asked for, and the model cannot be compiled.
    """
    drops = uses_dropout(model)
    if asked == "auto":
        size = sum(parameter.numel() for parameter in trainable(model))
        fits = problem.replayable and not drops and placement.ranks_per_worker == 1
        return fits and placement.device.type == "cuda" and size >= COMPILED_FROM
    require(
        not (asked and drops),
        "a compiled model cannot draw dropout for each worker; set compile False or dropout 0",
    )
    return asked


def build_workers(
    problem: Problem,
    method: Method,
    *,
    inner: InnerFactory,
    syncing: Syncing,
    batching: Batching,
    execution: Execution,
    placement: Placement,
) -> dict[int, Worker]:
    """Build the workers of this process, and return them by id.

    All workers of the run start from rank 0's parameters, because an average of models from
    different starts would mean nothing.

    Raises:
        ValueError: The model has no trainable parameters, or cannot be compiled.
    """
    model = problem.build_model()
    if problem.fill is None:
        placement.broadcast_model(model)
    compile = is_compiled(execution.compile, model, problem, placement)
    require(bool(trainable(model)), "build_model returned a model without trainable parameters")
    settings = InnerSettings(
        problem=problem,
        max_grad_norm=method.max_grad_norm,
        rule=batching.rule,
        test=batching.test,
        execution=execution,
        device=placement.device,
        syncing=syncing,
    )
    here = placement.local(method.living_workers)
    copies = [model, *(_copy(model, problem) for _ in here[1:])]
    return {
        worker: Worker(worker, own, inner, settings, placement.engine(own, compile, problem.fill))
        for worker, own in zip(here, copies, strict=True)
    }


def _copy(model: nn.Module, problem: Problem) -> nn.Module:
    """A model like this one, with the hooks and attributes of its parameters, which `deepcopy` of
    a parameter leaves out.
    """
    if _has_functions(model):
        with torch.random.fork_rng(devices=[]):
            built = problem.build_model()
        require(
            built is not model,
            "build_model must make a new model at each call, because hooks and functions of this "
            "one act on itself alone, and gave the same one again",
        )
        copy_all(
            [*model.parameters(), *written_buffers(model).values()],
            [*built.parameters(), *written_buffers(built).values()],
        )
        return built
    copied = copy.deepcopy(model)
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
