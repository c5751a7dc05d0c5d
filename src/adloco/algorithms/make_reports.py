"""The report of a round, computed from what every worker did in it."""

import math
from collections.abc import Collection, Mapping, Sequence

from adloco.algorithms.reports import RoundReport, StepLoss, SyncReport, TrainerReport, WorkerReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker_round import WorkerRound
from adloco.rules.agreement import mean_cosine, relative_error
from adloco.rules.merge import Merge


def step_losses(
    tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
) -> tuple[StepLoss, ...]:
    """Losses of all inner steps of the round, ordered by worker and step."""
    return tuple(
        StepLoss(
            trainer=tasks[worker].trainer,
            worker=worker,
            inner_step=tasks[worker].first_step + step + 1,
            loss=loss,
            samples=batch,
        )
        for worker, row in done.items()
        for step, (loss, batch) in enumerate(zip(row.losses, row.batches, strict=True))
    )


def report_workers(
    tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
) -> tuple[WorkerReport, ...]:
    """Reports of all workers of the run, by rising id."""
    slowest = max(row.turn_seconds for row in done.values())
    return tuple(
        WorkerReport(
            worker=worker,
            trainer=tasks[worker].trainer,
            worker_batch=tasks[worker].plan.worker_batch,
            busy_seconds=row.busy_seconds,
            wait_seconds=slowest - row.busy_seconds,
            skipped_steps=int(row.skipped_steps),
            restarts=int(row.restarts),
        )
        for worker, row in done.items()
    )


def report_sync(
    done: Mapping[int, WorkerRound], trainers: Sequence[TrainerReport], model_bytes: int
) -> SyncReport:
    """The report of a round's syncs.

    model_bytes: Size of the trainable parameters in the model's own data type.
    """
    syncs = [row.sync for row in done.values()]
    payload = sum(sync.num_bytes for sync in syncs)
    plain = model_bytes * sum(trainer.workers for trainer in trainers if trainer.workers > 1)
    return SyncReport(
        bytes=payload / len(done),
        compression_ratio=plain / payload if payload else None,
        exposed_seconds=max(sync.exposed_seconds for sync in syncs),
        hidden_seconds=max(sync.hidden_seconds for sync in syncs),
        transfer_seconds=max(sync.transfer_seconds for sync in syncs),
        peak_bytes_per_second=max(sync.peak_bytes_per_second for sync in syncs) or None,
    )


def report_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    merge: Merge | None,
    state: RunState,
    parts: RoundParts,
) -> RoundReport:
    """The report of a round, from what all workers of the run did in it and the state after it."""
    placement, handed = parts.placement, parts.bytes_handed()
    return RoundReport(
        round=state.rounds_done,
        samples=state.samples,
        inner_steps=state.inner_steps,
        syncs=state.syncs,
        sync_every=state.sync_every,
        bytes_communicated=handed.between / len(done),
        # Ranks add up thirds of bytes in other orders.
        bytes_sent=round(handed.sent / len(done), 3),
        bytes_inside=handed.inside / placement.num_ranks,
        bytes_ddp_equivalent=parts.model_bytes * state.inner_steps,
        train_loss=_mean_loss(done.values()),
        sync=report_sync(done, trainers, parts.model_bytes),
        trainers=tuple(trainers),
        workers=report_workers(tasks, done),
        merges=(merge,) if merge else (),
        steps=step_losses(tasks, done),
    )


def report_trainer(
    trainer: Trainer,
    requested_batch: int,
    tasks: Sequence[RoundTask],
    done: Sequence[WorkerRound],
    base_rate: float,
    distance: float | None,
) -> TrainerReport:
    """The report of a trainer after its sync, whose controller has seen the round's test.

    Args:
        requested_batch: Its requested batch in this round.
        tasks, done: What its workers had to do and have done, in the same order.
        base_rate: Their learning rate at a factor of 1.
        distance: From `trainer_distances`.
    """
    first, estimate = tasks[0], trainer.controller.estimate
    measured = trainer.controller.measured
    return TrainerReport(
        trainer=trainer.id,
        workers=len(tasks),
        requested_batch=requested_batch,
        worker_batch=first.plan.worker_batch,
        micro_batch=first.plan.micro_batch,
        accumulation_steps=first.plan.accumulation_steps,
        trainer_batch=sum(task.plan.worker_batch for task in tasks),
        rounded_up=sum(task.plan.rounded_up for task in tasks),
        grad_variance=estimate.grad_variance if estimate else None,
        grad_norm_sq=estimate.grad_norm_sq if estimate else None,
        noise_scale=estimate.noise_scale if estimate else None,
        # An infinite noise scale is not written, and neither is its error.
        noise_scale_factor=estimate.noise_scale_factor
        if estimate and math.isfinite(estimate.noise_scale)
        else None,
        measured_grad_variance=measured.grad_variance if measured else None,
        measured_grad_norm_sq=measured.grad_norm_sq if measured else None,
        train_loss=_mean_loss(done),
        learning_rate=base_rate
        * (first.lr_factor(first.inner_steps - 1) if first.lr_factor else 1.0),
        cosine_similarity=_six_digits(
            mean_cosine([row.sync.sent_sq for row in done], sum(row.sync.total_sq for row in done))
        ),
        wire_error=_six_digits(
            relative_error(
                [row.sync.error_sq for row in done], [row.sync.wanted_sq for row in done]
            )
        )
        if len(tasks) > 1
        else None,
        distance_to_mean=distance,
    )


def _mean_loss(done: Collection[WorkerRound]) -> float:
    """The mean loss over the samples of these workers, but for those none of whose steps was
    finite; nan if that is all of them.
    """
    rows = [row for row in done if not math.isnan(row.loss_sum)]
    return (
        sum(row.loss_sum for row in rows) / sum(row.samples for row in rows) if rows else math.nan
    )


def _six_digits(value: float | None) -> float | None:
    """The value without the digits that depend on where ranks cut the sums behind it; those sums
    are known to six (`block_squares`).
    """
    return None if value is None else round(value, 6)
