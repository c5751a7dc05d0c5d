"""The report of a round, computed from what every worker did in it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from adloco.algorithms.reports import (
    RoundReport,
    StepLoss,
    SyncReport,
    TrainerReport,
    WorkerReport,
)
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.comm.sync_stats import SyncStats
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes
from adloco.rules.agreement import mean_cosine, relative_error
from adloco.rules.merge import Merge
from adloco.rules.moments import Moments


@dataclass(frozen=True, kw_only=True)
class WorkerRound:
    """A worker's numbers of one round, which all ranks gather at its end."""

    busy_seconds: float
    """Seconds of its inner steps."""
    turn_seconds: float
    """`busy_seconds` times the turns in which its rank's workers run: 1 if all run at once, 2 if
    they take twice as long as the slowest of them."""
    loss_sum: float
    """Sum of the losses of its samples."""
    samples: float
    """Samples that it trained on."""
    sync: SyncStats
    """Cost of its syncs."""
    moments: Moments
    """Its gradient statistics."""
    skipped_steps: float
    """Inner steps that it left out, because they were not finite."""
    restarts: float
    """How often it started again from the parameters of the last sync."""
    losses: tuple[float, ...]
    """Loss of each inner step."""

    @staticmethod
    def of(worker: Worker, task: RoundTask, turns: float) -> "WorkerRound":
        """The numbers of a worker in this process.

        Args:
            worker: A worker that has done its round.
            task: Its task in the round.
            turns: Seconds of all workers of this rank over those of its slowest worker; at least 1.
        """
        # Steps that were left out have no loss.
        finite = [
            (loss, task.plan_of(step).worker_batch / task.plan.worker_batch)
            for step, loss in enumerate(worker.losses)
            if math.isfinite(loss)
        ]
        batches = sum(weight for _, weight in finite)
        mean = sum(loss * weight for loss, weight in finite) / batches if finite else math.nan
        loss_sum = mean * worker.round_samples
        busy = worker.busy_seconds
        return WorkerRound(
            busy_seconds=busy,
            turn_seconds=busy * turns,
            loss_sum=loss_sum,
            samples=worker.round_samples,
            sync=worker.sync,
            moments=worker.moments,
            skipped_steps=worker.skipped_steps,
            restarts=worker.restarts,
            losses=tuple(worker.losses),
        )

    def to_numbers(self) -> list[float]:
        """The float64 scalars that cross the network."""
        own = [self.busy_seconds, self.turn_seconds, self.loss_sum, self.samples]
        left_out = [float(self.skipped_steps), float(self.restarts)]
        pooled = [*self.sync.to_numbers(), *self.moments.to_numbers()]
        return [*own, *pooled, *left_out, *self.losses]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> "WorkerRound":
        """The inverse of `to_numbers`."""
        busy_seconds, turn_seconds, loss_sum, samples, *rest = numbers
        sync, moments = len(fields(SyncStats)), len(fields(Moments))
        return WorkerRound(
            busy_seconds=busy_seconds,
            turn_seconds=turn_seconds,
            loss_sum=loss_sum,
            samples=samples,
            sync=SyncStats.from_numbers(rest[:sync]),
            moments=Moments.from_numbers(rest[sync : sync + moments]),
            skipped_steps=rest[sync + moments],
            restarts=rest[sync + moments + 1],
            losses=tuple(rest[sync + moments + 2 :]),
        )


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
            samples=tasks[worker].plan_of(step).worker_batch,
        )
        for worker, row in done.items()
        for step, loss in enumerate(row.losses)
    )


def report_workers(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    stages: Sequence[Stage],
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
            more=merged(stage.of_worker(worker) for stage in stages),
        )
        for worker, row in done.items()
    )


def report_sync(
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    model_bytes: int,
    islands: int,
) -> SyncReport:
    """The report of a round's syncs.

    Args:
        done: The numbers of every worker of the run, by id.
        trainers: Reports of all trainers.
        model_bytes: Size of the trainable parameters in the model's own data type.
        islands: Islands over which the workers are spread.
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
        peak_bytes_per_second=max(sync.peak_bytes_per_second for sync in syncs)
        if islands > 1 and payload
        else None,
    )


def report_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    merge: Merge | None,
    *,
    state: RunState,
    sync_every: int,
    new_limit: int,
    handed: Bytes,
    model_bytes: int,
    placement: Placement,
) -> RoundReport:
    """The report of a round.

    Args:
        tasks: The tasks of every worker of the run, by id.
        done: Their numbers of the round, by id.
        trainers: Reports of all trainers.
        merge: The merge at the round's end; None if there was none.
        state: The state after the round.
        sync_every: H in force in the round.
        new_limit: The new cap on micro-batches if memory ran out in this round; else 0.
        handed: Bytes that all ranks have given to collectives since the run began.
        model_bytes: Size of the trainable parameters in the model's own data type.
        placement: Where all workers live.
    """
    islands = placement.num_ranks // placement.ranks_per_worker
    samples = sum(row.samples for row in done.values())
    return RoundReport(
        round=state.rounds_done,
        samples=state.samples,
        inner_steps=state.inner_steps,
        syncs=state.syncs,
        sync_every=sync_every,
        eta=state.chosen.eta,
        multiplier=state.chosen.multiplier,
        pass_limit=new_limit,
        bytes_communicated=handed.between / len(done),
        bytes_sent=handed.sent / len(done),
        bytes_inside=handed.inside / placement.num_ranks,
        bytes_ddp_equivalent=model_bytes * state.inner_steps,
        train_loss=sum(row.loss_sum for row in done.values()) / samples,
        sync=report_sync(done, trainers, model_bytes, islands),
        trainers=tuple(trainers),
        workers=report_workers(tasks, done, state.stages),
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
    stages: Sequence[Stage],
) -> TrainerReport:
    """The report of a trainer after its sync.

    Args:
        trainer: The trainer, whose controller has seen the round's test.
        requested_batch: Its requested batch in this round.
        tasks: The tasks of its workers.
        done: Their numbers of the round, in the same order.
        base_rate: Their learning rate at a factor of 1.
        distance: Of its global parameters from the mean of all trainers', relative to the mean.
        stages: The stages of the run.
    """
    first, estimate = tasks[0], trainer.controller.estimate
    measured = trainer.controller.measured
    several = len(tasks) > 1
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
        train_loss=sum(row.loss_sum for row in done) / sum(row.samples for row in done),
        learning_rate=base_rate
        * (first.lr_factor(first.inner_steps - 1) if first.lr_factor else 1.0),
        cosine_similarity=mean_cosine(
            [row.sync.sent_sq for row in done], sum(row.sync.total_sq for row in done)
        )
        if several
        else None,
        wire_error=relative_error(
            [row.sync.error_sq for row in done], [row.sync.wanted_sq for row in done]
        )
        if several
        else None,
        distance_to_mean=distance,
        more=merged(stage.of_trainer(trainer.id) for stage in stages),
    )


def merged(numbers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all stages."""
    return {name: value for own in numbers for name, value in own.items()}
