"""Checks that the sections of a run fit together, and builds its workers."""

import copy

from adloco.algorithms.dropout import uses_dropout
from adloco.algorithms.gradient_stats import measurement_of
from adloco.algorithms.method import Batching, Execution, Method, Problem, Syncing
from adloco.algorithms.optimizers import InnerFactory
from adloco.algorithms.planning import check_groups
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.learning_rate import LearningRate


def check_sections(
    problem: Problem,
    method: Method,
    batching: Batching,
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
        batching.test.step == "first" or method.workers_per_trainer == 1,
        "test.step must be first where trainers have several workers, which differ on the last "
        f"step; workers_per_trainer is {method.workers_per_trainer}",
    )
    schedule = learning_rate or LearningRate(shape="constant")
    falls = schedule.shape != "constant"
    require(
        not falls or schedule.total_tokens > 0,
        "learning_rate.total_tokens must be > 0 for this shape, got 0",
    )
    end = schedule.final_fraction if falls else 1.0
    require(
        method.sync_growth == 0 or 0 < end < 1,
        "method.sync_growth needs a learning rate that falls (learning_rate.shape cosine or wsd), "
        "and not to 0, where rounds would have no end; it falls to a fraction of "
        f"{end:g} here (learning_rate.final_fraction)",
    )
    # The rate then falls by sqrt(a) where the batch grows by 1/a, also after merges.
    coupled = schedule.reference_batch if schedule.coupling == "sqrt" else 0
    require(
        not isinstance(batching.rule, Seesaw)
        or (falls and coupled == batching.guards.initial >= method.num_workers),
        "batch.rule seesaw needs a learning rate that falls (shape cosine or wsd), "
        "learning_rate.coupling sqrt with reference_batch = batch.initial, and a batch.initial >= "
        f"the number of all workers; got {batching.guards.initial} for {method.num_workers}",
    )


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
    require(
        not (execution.compile and uses_dropout(model)),
        "a compiled model cannot draw dropout for each worker; set compile False or dropout 0",
    )
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
    copies = [model, *(copy.deepcopy(model) for _ in here[1:])]
    return {
        worker: Worker(
            worker, own, inner, settings, placement.engine(own, execution.compile, problem.fill)
        )
        for worker, own in zip(here, copies, strict=True)
    }
