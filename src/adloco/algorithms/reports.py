"""The reports of a round: frozen values without tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adloco.rules.merge import Merge


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """One trainer in one round. Batches are in samples."""

    trainer: int
    workers: int
    """Number of its workers."""
    requested_batch: int
    """The trainer's requested batch in this round, per inner step over all its workers, before the
    request is clipped at what fits in memory."""
    worker_batch: int
    """Batch of its first worker per inner step. With equal shares, no worker has a larger one."""
    micro_batch: int
    """The largest micro-batch of a rank."""
    accumulation_steps: int
    """Micro-batches of each rank per inner step."""
    trainer_batch: int
    """Batch that was trained per inner step, over all its workers.

    It is less than requested if the request was clipped. It is more, and can exceed
    `batch.maximum`, if workers or ranks would otherwise have too few samples."""
    rounded_up: int
    """Samples of `trainer_batch` that were added so that every rank has work in every pass."""
    grad_variance: float | None
    """S, the trace of the per-sample gradient covariance, from all tests so far; None if the rule
    takes no statistics."""
    grad_norm_sq: float | None
    """|G|^2, the squared norm of the true gradient, from all tests so far."""
    noise_scale: float | None
    """S / |G|^2 in samples, of these two."""
    noise_scale_factor: float | None
    """The noise scale is known to within this factor, one standard deviation up or down."""
    measured_grad_variance: float | None
    """S as the last tests alone measured it."""
    measured_grad_norm_sq: float | None
    """|G|^2 as the last tests alone measured it: unbiased, and negative where noise dominates."""
    train_loss: float
    """Mean loss over the samples of the round."""
    learning_rate: float
    """Rate of the last inner step, in the first parameter group of the inner optimizer."""
    cosine_similarity: float | None
    """Mean cosine over pairs of its workers' pseudo-gradients as sent, each pair weighted by the
    product of its norms; None with one worker."""
    wire_error: float | None
    """Norm of what the wire format lost, over the norm of what was given to it; None with one
    worker."""
    distance_to_mean: float | None
    """Estimate of |x - mean| / |mean| for its global parameters x after the sync and the mean of
    all trainers', before a merge; None with one trainer."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """One worker in one round."""

    worker: int
    trainer: int
    worker_batch: int
    """Samples per inner step."""
    busy_seconds: float = field(compare=False)
    """Seconds of its inner steps."""
    wait_seconds: float = field(compare=False)
    """Seconds of waiting: the seconds until the slowest rank's workers were done, less
    `busy_seconds`. A worker waits for its turn on its rank and for others at the sync."""
    skipped_steps: int
    """Inner steps that it left out, because the loss or the gradient was not finite."""
    restarts: int
    """Number of restarts from the parameters of the last sync after numbers that were not
    finite."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Values that stages report about the worker, by the names of their options' metrics."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The syncs of one round. All seconds are the largest of any worker."""

    bytes: float
    """Payload that one worker sent in them, as a mean over workers."""
    compression_ratio: float | None
    """Payload that the same syncs have in the parameters' own data type, over `bytes`; None if
    nothing was sent."""
    exposed_seconds: float = field(compare=False)
    """Seconds for which training stopped: waiting for others, encoding, the part of a transfer that
    was not hidden, and the outer step."""
    hidden_seconds: float = field(compare=False)
    """Seconds for which fragments were in flight while training continued."""
    transfer_seconds: float = field(compare=False)
    """Seconds for which fragments were in flight, hidden or not. Encoding is included if training
    stopped for it."""
    peak_bytes_per_second: float | None = field(compare=False)
    """Bytes per second of a worker while the fastest fragment was in flight that crossed between
    islands; None if none did, because each trainer's workers live on one island."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that the run has changed after a round."""

    setting: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Loss of one inner step of one worker, before the step's update."""

    trainer: int
    worker: int
    inner_step: int
    """Number of the step in the run, from 1."""
    loss: float
    """Mean loss over the step's samples."""
    samples: int
    """Samples of the step."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RoundReport:
    """One round: inner steps, sync, and merge if one was due.

    Rounds, samples, inner steps, syncs and bytes are totals since the start of the run. Bytes are
    payload in one direction.
    """

    round: int
    """Rounds so far, including this one."""
    samples: int
    """Samples trained on so far by all workers."""
    inner_steps: int
    """Inner steps of each worker so far."""
    syncs: int
    """Rounds so far in which workers exchanged parameters."""
    sync_every: int
    """H in force in this round, which has fewer inner steps if a budget ends it."""
    bytes_communicated: float
    """Bytes that one worker gave to collectives with others (sums, broadcasts, gathered numbers),
    as a mean over workers."""
    bytes_sent: float
    """Bytes that left one worker for these collectives. With more than two workers they are more
    than `bytes_communicated`, because parts are sent on around a ring."""
    bytes_inside: float
    """Bytes that one rank gave to collectives inside its island, as a mean over ranks."""
    bytes_ddp_equivalent: int
    """Bytes that one worker would have given to reductions in data-parallel training with as many
    steps: the size of the trainable parameters times inner steps."""
    train_loss: float
    """Mean loss over all samples of the round."""
    sync: SyncReport
    """The syncs of the round."""
    trainers: tuple[TrainerReport, ...]
    """The trainers that lived during the round."""
    workers: tuple[WorkerReport, ...]
    """All workers, by rising id."""
    merges: tuple[Merge, ...]
    """The merge at the end of the round, if there was one."""
    changes: tuple[Change, ...] = ()
    """What the run changed after the round: the cap on micro-batches, if memory ran out."""
    steps: tuple[StepLoss, ...]
    """Losses of all inner steps of all workers."""

    def __repr__(self) -> str:
        batches = [trainer.trainer_batch for trainer in self.trainers]
        return (
            f"<round {self.round}: {self.samples:,} samples, train loss {self.train_loss:.4f}, "
            f"batch of each trainer {batches}, {self.syncs} syncs, {len(self.merges)} merges>"
        )
