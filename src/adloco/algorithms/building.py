"""Checks that the sections of a run fit together, and builds its workers."""

from typing import Literal

from torch import nn

from adloco.algorithms.dropout import uses_dropout
from adloco.algorithms.gradient_stats import measurement_of
from adloco.algorithms.method import Batching, Merging, Method, Problem
from adloco.algorithms.model_state import check_apart, check_filled, check_memory, copy_all
from adloco.algorithms.planning import check_groups
from adloco.algorithms.replica_checks import check_alike, check_wrappers
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.device import own_random_numbers
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.parallel.layers import require_bare, written_tensors
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
    streams, least = problem.data.num_streams, method.num_workers
    require(streams >= least, f"data needs num_streams >= {least} (the workers), got {streams}")
    living = [*method.living_workers]
    require(
        placement.workers in (None, living),
        f"the placement has the workers {placement.workers}, but {living} train here; give "
        f"place({living if method.dropped else len(living)})",
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


def build_workers(settings: InnerSettings, placement: Placement) -> dict[int, Worker]:
    """Build the workers of this process, and return them by id.

    All workers of the run start from rank 0's parameters, because an average of models from
    different starts would mean nothing. Each model is built, and none is copied: `deepcopy` leaves
    functions and hooks with the first one.

    Raises:
        ValueError: The model has no trainable parameters, or some that share memory, or cannot be
            compiled; or the workers' models differ.
    """
    problem, here = settings.problem, placement.local(settings.method.living_workers)
    model = problem.build_model()
    require(
        isinstance(model, nn.Module),
        f"build_model must return a new model, and returned {type(model).__name__}",
    )
    require_bare(model)
    check_wrappers([model], placement)
    check_memory(model)
    require(bool(trainable(model)), "build_model returned a model without trainable parameters")
    if problem.fill is None:
        check_filled(model)
    with own_random_numbers():
        models = [model, *(problem.build_model() for _ in here[1:])]
    check_alike(dict(zip(here, models, strict=True)), {}, placement)
    check_apart(models)
    if problem.fill is None:
        placement.broadcast_model(model)
        for own in models[1:]:
            copy_all(written_tensors(model).values(), written_tensors(own).values())
    compile = is_compiled(settings.execution.compile, model, problem, placement)
    return {
        worker: Worker(worker, own, settings, placement.engine(own, compile, problem.fill))
        for worker, own in zip(here, models, strict=True)
    }
