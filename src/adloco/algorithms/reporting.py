"""From what every worker did in a round to the round's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from adloco.algorithms.reports import (
    RoundReport,
    StepLoss,
    SyncReport,
    TrainerReport,
    WorkerReport,
)
from adloco.algorithms.run_state import RunState
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import RoundTask, Worker
from adloco.distributed.comm.metered import SyncStats
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes
from adloco.rules.agreement import mean_cosine, relative_error
from adloco.rules.merge import Merge
from adloco.rules.moments import Moments


@dataclass(frozen=True, kw_only=True)
class WorkerRound:
    """What all ranks must know of a worker at the end of a round."""

    busy_seconds: float
    turn_seconds: float
    """`busy_seconds` times the number of turns that its rank's workers took; 1 where all run at
    once."""
    loss_sum: float
    """Sum of the losses of its samples."""
    samples: float
    sync: SyncStats
    moments: Moments
    losses: tuple[float, ...]
    """Loss of each inner step."""

    @staticmethod
    def of(worker: Worker, turns: float) -> "WorkerRound":
        """What a worker of this process did."""
        # Every inner step of a round has the same batch.
        loss_sum = sum(worker.losses) / len(worker.losses) * worker.round_samples
        busy = worker.busy_seconds
        return WorkerRound(
            busy_seconds=busy,
            turn_seconds=busy * turns,
            loss_sum=loss_sum,
            samples=worker.round_samples,
            sync=worker.sync,
            moments=worker.moments,
            losses=tuple(worker.losses),
        )

    def to_numbers(self) -> list[float]:
        """The float64 scalars that cross the network."""
        own = [self.busy_seconds, self.turn_seconds, self.loss_sum, self.samples]
        return [*own, *self.sync.to_numbers(), *self.moments.to_numbers(), *self.losses]

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
            losses=tuple(rest[sync + moments :]),
        )


def step_losses(
    tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
) -> tuple[StepLoss, ...]:
    """Losses of all inner steps of the round, by worker."""
    return tuple(
        StepLoss(
            trainer=tasks[worker].trainer,
            worker=worker,
            inner_step=tasks[worker].first_step + step + 1,
            loss=loss,
            samples=tasks[worker].plan.worker_batch,
        )
        for worker, row in done.items()
        for step, loss in enumerate(row.losses)
    )


def report_workers(
    tasks: Mapping[int, RoundTask], done: Mapping[int, WorkerRound]
) -> tuple[WorkerReport, ...]:
    """All workers, in rising order."""
    slowest = max(row.turn_seconds for row in done.values())
    return tuple(
        WorkerReport(
            worker=worker,
            trainer=tasks[worker].trainer,
            worker_batch=tasks[worker].plan.worker_batch,
            busy_seconds=row.busy_seconds,
            wait_seconds=slowest - row.busy_seconds,
        )
        for worker, row in done.items()
    )


def report_sync(
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    model_bytes: int,
    islands: int,
) -> SyncReport:
    """The syncs of a round. model_bytes: of all that is synced, in its own type; islands: over how
    many the workers are spread.
    """
    syncs = [row.sync for row in done.values()]
    handed = sum(sync.num_bytes for sync in syncs)
    plain = model_bytes * sum(trainer.workers for trainer in trainers if trainer.workers > 1)
    return SyncReport(
        bytes=handed / len(done),
        compression_ratio=plain / handed if handed else None,
        exposed_seconds=max(sync.exposed_seconds for sync in syncs),
        hidden_seconds=max(sync.hidden_seconds for sync in syncs),
        transfer_seconds=max(sync.transfer_seconds for sync in syncs),
        peak_bytes_per_second=max(sync.peak_bytes_per_second for sync in syncs)
        if islands > 1 and handed
        else None,
    )


def report_round(
    tasks: Mapping[int, RoundTask],
    done: Mapping[int, WorkerRound],
    trainers: Sequence[TrainerReport],
    merge: Merge | None,
    *,
    state: RunState,
    new_limit: int,
    handed: Bytes,
    model_bytes: int,
    placement: Placement,
) -> RoundReport:
    """The report of a round.

    Args:
        tasks, done: Of every worker of the run.
        new_limit: The largest micro-batch if memory ran out in this round; else 0.
        handed: Bytes of all ranks since the run began.
        model_bytes: Size of what is synced in the model's own data type.
    """
    islands = placement.num_ranks // placement.ranks_per_worker
    samples = sum(row.samples for row in done.values())
    return RoundReport(
        round=state.rounds_done,
        samples=state.samples,
        inner_steps=state.inner_steps,
        syncs=state.syncs,
        pass_limit=new_limit,
        bytes_communicated=handed.between / len(done),
        bytes_sent=handed.sent / len(done),
        bytes_inside=handed.inside / placement.num_ranks,
        bytes_ddp_equivalent=model_bytes * state.inner_steps,
        train_loss=sum(row.loss_sum for row in done.values()) / samples,
        sync=report_sync(done, trainers, model_bytes, islands),
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
) -> TrainerReport:
    """A trainer after its sync.

    Args:
        requested_batch: As in force in this round.
        tasks, done: Of its workers, the largest share first.
        base_rate: Their learning rate at a factor of 1.
    """
    first, seen = tasks[0], trainer.controller.estimate
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
        grad_variance=seen.grad_variance if seen else None,
        grad_norm_sq=seen.grad_norm_sq if seen else None,
        noise_scale=seen.noise_scale if seen else None,
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
    )
