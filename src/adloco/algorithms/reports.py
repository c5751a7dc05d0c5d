"""What a round reports: frozen values, no tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

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
    """The same, times how often its rank's workers had to wait for one another's turn: 1 where all
    run at once.
    """
    loss_sum: float
    """Over samples."""
    samples: float
    sync: SyncStats
    moments: Moments
    losses: tuple[float, ...]
    """Of its inner steps."""

    @staticmethod
    def of(worker: Worker, turns: float) -> "WorkerRound":
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


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """One trainer in one round."""

    trainer: int
    workers: int
    requested_batch: int
    """In force in this round: samples per inner step over all its workers, before clipping at what
    fits.
    """
    worker_batch: int
    """Samples per inner step of its first worker, which has the largest share unless shares go by
    speed.
    """
    micro_batch: int
    """Of a rank, the largest."""
    accumulation_steps: int
    """Passes of each rank per inner step."""
    trainer_batch: int
    """Samples per inner step over all its workers, as trained.

    Less than requested where that is clipped at what fits. More where workers or ranks would have
    too few samples, which can be more than `batch.maximum`.
    """
    rounded_up: int
    """Samples of these that were added so that every rank has work."""
    grad_variance: float | None
    """S, smoothed as the batch rule saw it; None where the rule takes no statistics."""
    grad_norm_sq: float | None
    """|G|^2, unbiased and smoothed; can be negative."""
    noise_scale: float | None
    """S / |G|^2 in samples; infinite where |G|^2 is not positive."""
    train_loss: float
    """Mean over the samples of the round."""
    learning_rate: float
    """Of the last inner step, in the first group of the inner optimizer."""
    cosine_similarity: float | None
    """Of its workers' pseudo-gradients, as sent: mean over pairs, weighted by their norms; None for
    a worker alone.
    """
    wire_error: float | None
    """Norm of what the wire format has lost, relative to what was to be sent; None for a worker
    alone.
    """


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """One worker in one round."""

    worker: int
    trainer: int
    worker_batch: int
    """Samples per inner step."""
    busy_seconds: float = field(compare=False)
    """Taken by its inner steps."""
    wait_seconds: float = field(compare=False)
    """The rest of the time until the slowest rank's workers were done: waiting for its turn on its
    rank, and for others at the sync.
    """


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The syncs of one round. Seconds are those of the worker for which they were most."""

    bytes: float
    """What one worker has handed over in them (payload, mean over workers)."""
    compression_ratio: float | None
    """What it would have handed over in the parameters' own type, over that; None where nothing
    was.
    """
    exposed_seconds: float = field(compare=False)
    """That training stood still: waiting for others, encoding, whatever of a transfer was not
    hidden, the outer step.
    """
    hidden_seconds: float = field(compare=False)
    """That fragments travelled while training went on."""
    transfer_seconds: float = field(compare=False)
    """That fragments travelled, hidden or not; where training stands still for them, encoding them
    included.
    """
    peak_bytes_per_second: float | None = field(compare=False)
    """Of a worker, while the fragment travelled that was fastest; None where nothing was sent, or
    all workers live on one island.
    """


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Loss of one inner step of one worker, before the step's update."""

    trainer: int
    worker: int
    inner_step: int
    """Counted over the run, from 1."""
    loss: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round: inner steps, sync, and merge if one was due. Counters are totals since the start
    of the run.
    """

    round: int
    samples: int
    inner_steps: int
    """Of each worker, one after another."""
    syncs: int
    """Rounds so far in which workers exchanged parameters."""
    bytes_communicated: float
    """What one worker has handed to reductions with others (payload, one direction, mean over
    workers).
    """
    bytes_sent: float
    """What has left one worker by them, as in a ring: for more than two workers, more than it has
    handed over.
    """
    bytes_inside: float
    """What one rank has handed to collectives with the others of its island (payload, one
    direction, mean over ranks).
    """
    bytes_ddp_equivalent: int
    """What it would have handed over in data-parallel training with as many steps: the trainable
    parameters x inner steps.
    """
    train_loss: float
    """Mean over all samples of the round."""
    pass_limit: int
    """Where memory ran out in this round: the largest micro-batch from now on; else 0."""
    sync: SyncReport
    trainers: tuple[TrainerReport, ...]
    workers: tuple[WorkerReport, ...]
    merges: tuple[Merge, ...]
    steps: tuple[StepLoss, ...]
    """Step losses of all workers."""


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
