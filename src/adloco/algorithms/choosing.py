"""Connects a run with its settings that are `auto`: which they are, and what a round measured."""

from collections.abc import Mapping

from adloco.algorithms.method import Method
from adloco.algorithms.reporting import WorkerRound
from adloco.algorithms.worker import RoundTask
from adloco.errors import require
from adloco.rules.auto import AutoController, AutoLimits, Chosen, MeasuredRound
from adloco.rules.merge import MergePolicy
from adloco.rules.sync_schedule import Streaming


def check_auto(
    limits: AutoLimits, method: Method, streaming: Streaming, policy: MergePolicy
) -> None:
    """Raise ValueError if a setting is auto that the run cannot choose."""
    if method.sync_every == "auto":
        require(
            method.syncs(policy),
            "method.sync_every must be a number where no trainer ever has two workers, because "
            "nothing is synced, got auto; or give method.workers_per_trainer more than 1",
        )
        require(
            limits.sync_every_maximum >= streaming.fewest_steps,
            f"auto.sync_every_maximum must be >= {streaming.fewest_steps}, the fewest inner steps "
            f"of a round with streaming.fragments = {streaming.fragments} and streaming.tau = "
            f"{streaming.tau}, got {limits.sync_every_maximum}",
        )


def auto_controller(limits: AutoLimits, method: Method, streaming: Streaming) -> AutoController:
    """The controller of a new run. A setting that is auto begins with its default."""
    own, default = method.sync_every, Method().sync_every
    return AutoController(
        limits,
        Chosen(sync_every=int(default if own == "auto" else own)),
        auto={"sync_every"} if own == "auto" else (),
        fewest_steps=streaming.fewest_steps,
    )


def measured_round(
    tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
) -> MeasuredRound:
    """What a round tells about the time of others.

    Args:
        tasks: The tasks of every worker of the run, by id.
        done: Their numbers of the round, by id.
    """
    steps = max(task.inner_steps for task in tasks.values())
    trainers = [task.trainer for task in tasks.values()]
    syncs = [
        row.sync.exposed_seconds
        for worker, row in done.items()
        if trainers.count(tasks[worker].trainer) > 1
    ]
    return MeasuredRound(
        step_seconds=max(row.turn_seconds for row in done.values()) / steps,
        sync_seconds=min(syncs, default=None),
    )
