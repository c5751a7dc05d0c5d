"""What a round reports: frozen values, no tensors."""

from dataclasses import dataclass, field

from adloco.rules.merge import Merge


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """One trainer in one round. Batches are in samples."""

    trainer: int
    workers: int
    """Workers that serve it."""
    requested_batch: int
    """Request in force in this round, per inner step over all its workers, before it is clipped at
    what fits."""
    worker_batch: int
    """Batch of its first worker per inner step. That worker has the largest share unless shares go
    by speed."""
    micro_batch: int
    """The largest micro-batch of a rank."""
    accumulation_steps: int
    """Micro-batches of each rank per inner step."""
    trainer_batch: int
    """Batch per inner step over all its workers, as trained.

    It is less than requested where the request is clipped at what fits. It is more, even than
    `batch.maximum`, where workers or ranks would have too few samples."""
    rounded_up: int
    """Samples of `trainer_batch` that were added so that every rank has work."""
    grad_variance: float | None
    """S, smoothed as the batch rule saw it; None where the rule takes no statistics."""
    grad_norm_sq: float | None
    """|G|^2, unbiased and smoothed; can be negative."""
    noise_scale: float | None
    """S / |G|^2 in samples; infinite where |G|^2 is not positive."""
    train_loss: float
    """Mean loss over the samples of the round."""
    learning_rate: float
    """Rate of the last inner step, in the first group of the inner optimizer."""
    cosine_similarity: float | None
    """Mean cosine of pairs of its workers' pseudo-gradients as sent, weighted by their norms; None
    for a worker alone."""
    wire_error: float | None
    """Norm of what the wire format lost, relative to what was to be sent; None for a worker
    alone."""


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
    """Seconds until the slowest rank's workers were done, less its own: it waits for its turn on
    its rank, and for others at the sync."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The syncs of one round. Seconds are those of the worker with the most."""

    bytes: float
    """Payload that one worker handed over in them, mean over workers."""
    compression_ratio: float | None
    """Payload that it would have handed over in the parameters' own type, over `bytes`; None where
    nothing was sent."""
    exposed_seconds: float = field(compare=False)
    """Seconds that training stood still: waiting for others, encoding, the part of a transfer that
    was not hidden, and the outer step."""
    hidden_seconds: float = field(compare=False)
    """Seconds that fragments were in flight while training went on."""
    transfer_seconds: float = field(compare=False)
    """Seconds that fragments were in flight, hidden or not. Encoding counts where training stands
    still for it."""
    peak_bytes_per_second: float | None = field(compare=False)
    """Rate of a worker while its fastest fragment was in flight; None where nothing was sent, or
    all workers live on one island."""


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
    """One round: inner steps, sync, and merge if one was due.

    Counters are totals since the start of the run. Bytes are payload in one direction.
    """

    round: int
    samples: int
    inner_steps: int
    """Inner steps of each worker, one after another."""
    syncs: int
    """Rounds so far in which workers exchanged parameters."""
    bytes_communicated: float
    """Bytes that one worker handed to reductions with others, mean over workers."""
    bytes_sent: float
    """Bytes that left one worker by them: a ring of more than two workers sends more than it was
    handed."""
    bytes_inside: float
    """Bytes that one rank handed to collectives inside its island, mean over ranks."""
    bytes_ddp_equivalent: int
    """Bytes that one worker would have handed over in data-parallel training with as many steps:
    the trainable parameters times inner steps."""
    train_loss: float
    """Mean loss over all samples of the round."""
    pass_limit: int
    """The largest micro-batch from now on if memory ran out in this round; else 0."""
    sync: SyncReport
    trainers: tuple[TrainerReport, ...]
    workers: tuple[WorkerReport, ...]
    merges: tuple[Merge, ...]
    steps: tuple[StepLoss, ...]
    """Losses of all inner steps of all workers."""
