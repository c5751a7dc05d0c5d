"""Connects a run with its settings that are `auto`: which they are, and what a round measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from adloco.algorithms.method import Batching, Method
from adloco.algorithms.reports import TrainerReport
from adloco.errors import require
from adloco.rules.auto import AutoController, AutoLimits, Chosen, MeasuredRound
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.merge import MergePolicy
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming

if TYPE_CHECKING:
    from adloco.algorithms.reporting import WorkerRound
    from adloco.algorithms.round_task import RoundTask


def check_auto(
    limits: AutoLimits,
    method: Method,
    batching: Batching,
    streaming: Streaming,
    policy: MergePolicy,
) -> None:
    """Raise ValueError if a setting is auto that the run cannot choose."""
    require(
        batching.switch.multiplier != "auto" or batching.rule.needs_moments,
        "switch.multiplier must be a number with a batch rule that measures no noise scale, got "
        "auto; or set batch.rule to norm-test",
    )
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


def auto_controller(
    limits: AutoLimits, method: Method, batching: Batching, streaming: Streaming
) -> AutoController:
    """The controller of a new run. A setting that is auto begins with its default."""
    norm_test = batching.rule if isinstance(batching.rule, NormTest) else None
    given = {
        "sync_every": (method.sync_every, Method().sync_every),
        "eta": (norm_test.eta, NormTest().eta) if norm_test else (None, None),
        "multiplier": (batching.switch.multiplier, SwitchMode().multiplier),
    }
    numbers: dict[str, Any] = {
        name: default if own == "auto" else own for name, (own, default) in given.items()
    }
    return AutoController(
        limits,
        Chosen(**numbers),
        auto=[name for name, (own, _) in given.items() if own == "auto"],
        norm_test=norm_test,
        fewest_steps=streaming.fewest_steps,
    )


def measured_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    fits: int,
) -> MeasuredRound:
    """What a round tells about the time of others.

    Args:
        tasks: The tasks of every worker of the run, by id.
        done: Their numbers of the round, by id.
        trainers: Reports of all trainers.
        fits: Samples that fit in one pass of a worker's ranks.
    """
    steps = max(task.inner_steps for task in tasks.values())
    several = {trainer.trainer for trainer in trainers if trainer.workers > 1}
    syncs = [
        row.sync.exposed_seconds for worker, row in done.items() if tasks[worker].trainer in several
    ]
    return MeasuredRound(
        trainer_batch=fmean(trainer.trainer_batch for trainer in trainers),
        fits=fits * fmean(trainer.workers for trainer in trainers),
        noise_scale=_noise_scale(trainers),
        step_seconds=max(row.turn_seconds for row in done.values()) / steps,
        sync_seconds=min(syncs, default=None),
    )


def _noise_scale(trainers: Sequence[TrainerReport]) -> float | None:
    """The mean S over the mean |G|^2 of the trainers; None if it is not measured or not finite."""
    variance = fmean(trainer.grad_variance or 0.0 for trainer in trainers)
    norm_sq = fmean(trainer.grad_norm_sq or 0.0 for trainer in trainers)
    return variance / norm_sq if variance > 0 and norm_sq > 0 else None
