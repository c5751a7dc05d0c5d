"""The inputs of a run: the problem, and the sections of the method, each a frozen dataclass.

`run/start.py` passes most sections of a recipe unchanged to `AdLoCo`; `Recipe.batching`, `merging`
and `syncing` join those that belong together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from adloco.algorithms.optimizers import OuterFactory
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat, at_least
from adloco.errors import (
    SettingError,
    require,
    require_choices,
    require_objects,
    require_range,
    require_setting,
    shown,
)
from adloco.late import torch
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.controller import BatchGuards
from adloco.rules.merge import MergeFates, MergePolicy
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.rules.shares import EqualShares, Shares
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming
from adloco.setting import setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adloco.distributed.parallel.layers import Fill

MOST_WORKERS = 1_000_000
"""More workers than any cluster has; the lists of their ids still fit in memory."""

OnNonFinite = Literal["stop", "skip", "restore"]
"""Action of a worker whose numbers are not finite (docs/method.md). stop: the run ends with
`NonFiniteLossError`. skip: an inner step whose loss or gradient is not finite leaves the parameters
as they are. restore: the worker starts again from the parameters of the last sync, with fresh
optimizer state."""
LossFunction = Callable[[Any, Any], "Tensor"]
"""(model, batch) -> mean loss over the batch's samples."""


class Source(Protocol):
    """Training data as numbered samples in numbered streams (docs/method.md)."""

    @property
    def num_streams(self) -> int:
        """Number of disjoint streams."""

    def read(self, stream: int, position: int, count: int) -> Any:
        """Read the samples position ... position + count - 1 of a stream, as a batch; after the
        last one its first one comes again.

        They depend only on these numbers and on a seed, not on earlier reads. Threads of several
        workers call it at once.
        """


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The training problem: a model, its loss and its data."""

    build_model: Callable[[], nn.Module]
    """Makes a new model. Called for each worker, and on each of its ranks; every worker starts from
    rank 0's parameters and buffers."""
    loss_fn: LossFunction
    """(model, batch) -> mean loss over the batch's samples. `model` can be a wrapper (DDP or a
    compiled model), so the function should only call it and not read its attributes."""
    data: Source
    """The training data, with at least one stream for each worker."""
    compiled_loss_fn: LossFunction | None = None
    """`loss_fn` of a model that is compiled; None: the same one."""
    fill: Fill | None = None
    """Gives values to one part of a model on the meta device, so that no rank has to hold a whole
    sharded model; see `distributed.parallel.layers.Fill`. None for other models."""
    replayable: bool = False
    """True if a batch is one tensor of `tokens_per_sample` + 1 tokens a sample, and loss and model
    do the same on all batches of one shape, and change nothing but gradients. Passes over small
    batches are then captured on a GPU (`cuda_graphs.py`)."""
    tokens_per_sample: int = 1
    """Tokens of a sample, for schedules in tokens."""
    islands: int = 1
    """Islands with texts of their own, among which the streams of `data` are divided (`island_of`).
    """
    validation: Sequence[Any] = ()
    """Batches, like those that `data` gives, on which `adloco.train` evaluates: the validation loss
    is the mean of their losses. `AdLoCo` does not read it."""

    def __post_init__(self) -> None:
        require(
            callable(self.build_model) and not isinstance(self.build_model, torch.nn.Module),
            "build_model must be a function that makes a new model at each call, got "
            f"{type(self.build_model).__name__}; write build_model=lambda: ...",
        )
        require(callable(self.loss_fn), f"loss_fn must be a function, got {shown(self.loss_fn)}")
        require(
            hasattr(self.data, "num_streams") and hasattr(self.data, "read"),
            "data must have num_streams and read(stream, position, count), as adloco.TensorSource "
            f"of your tensors has, got {type(self.data).__name__}",
        )
        # Negative tokens would turn the warm-up of a learning rate into steps uphill.
        require_range(self, "tokens_per_sample", "islands", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Method:
    """The numbers of trainers and workers, and the length of a round."""

    num_trainers: int = setting(1, aliases=("k", "trainers"))
    """Trainers at the start (k): independent training trajectories, which merges can join."""
    workers_per_trainer: int = setting(1, aliases=("m", "num_workers", "workers"))
    """Workers of each trainer (M): model copies that train on their own data between syncs."""
    sync_every: int = setting(20, resume="recorded", aliases=("h", "local_steps"))
    """Inner optimizer steps per round (H)."""
    sync_growth: float = 0.0
    """Exponent by which rounds become longer while the learning rate decays: a round has sync_every
    x (peak rate / rate at its beginning) ^ sync_growth inner steps. 0: not at all; 1: the workers
    move about as far in each round; 2: the quadratic synchronisation rule (arXiv 2310.14423)."""
    dropped: tuple[int, ...] = setting((), resume="grows")
    """Workers that train no more, by number from 0: those of a failed island, without which the
    others continue (run.on_rank_failure = drop).
    """
    max_grad_norm: float = setting(1.0, resume="recorded", aliases=("clip", "grad_clip"))
    """Largest norm of a worker's gradient at an inner step; larger gradients are scaled down to it.
    0: no limit."""

    def __post_init__(self) -> None:
        require_range(self, "num_trainers", "workers_per_trainer", "sync_every", at_least=1)
        whole = self.sync_every % 1 == 0
        require_setting(whole, self, "sync_every", "must be a whole number")
        if self.num_workers > MOST_WORKERS:
            sizes = f"{self.num_trainers:,} x {self.workers_per_trainer:,}"
            problem = f"x {{workers_per_trainer}} must be <= {MOST_WORKERS:,}, got {sizes}"
            raise SettingError(self, "num_trainers", problem)
        require_setting(
            len({*self.dropped}) == len(self.dropped) < self.num_workers
            and all(0 <= worker < self.num_workers for worker in self.dropped),
            self,
            "dropped",
            f"must be some of the workers 0 to {self.num_workers - 1}, not all",
        )
        # Larger powers of the rate would be rounded to 0, by which nothing can be divided.
        require_range(self, "sync_growth", at_least=0, at_most=100)
        require_range(self, "max_grad_norm", at_least=0)

    @property
    def num_workers(self) -> int:
        """Workers of all trainers together, those that are dropped included."""
        return self.num_trainers * self.workers_per_trainer

    @property
    def living_workers(self) -> tuple[int, ...]:
        """Ids of the workers that train."""
        dropped = {*self.dropped}
        return tuple(worker for worker in range(self.num_workers) if worker not in dropped)

    def after_merges(self, policy: MergePolicy) -> tuple[int, int]:
        """(workers of a trainer, trainers) after the last merge of a run that is long enough for
        it: if trainers merge, one has all workers in the end.
        """
        if isinstance(policy, NoMerge):
            return self.workers_per_trainer, self.num_trainers
        return self.num_workers, 1

    def syncs(self, policy: MergePolicy) -> bool:
        """True if a trainer has several workers, at the start or after a merge. A lone worker sends
        nothing at a sync.
        """
        return self.after_merges(policy)[0] > 1

    def living_sync(self, policy: MergePolicy) -> bool:
        """True as `syncs`, of the workers that train: those that are dropped sync no more."""
        living = self.living_workers
        of_trainers = Counter(worker // self.workers_per_trainer for worker in living)
        most = max(of_trainers.values()) if isinstance(policy, NoMerge) else len(living)
        return most > 1


@dataclass(frozen=True, kw_only=True)
class GradientTest:
    """Settings of the gradient statistics that workers take for some batch rules.

    An inner step on which they are taken is a test step.
    """

    groups: int = 4
    """Groups of samples into which a worker splits the batch of a test step, over all its ranks; a
    multiple of this number if it accumulates more micro-batches."""
    steps: int = 4
    """Test steps of each round. Several tell |G|^2 more precisely than one, and how precisely it is
    known. Each takes as much longer as splitting its batch into groups does (on a CPU, with a small
    model, a tenth at 16 samples and two thirds at 4); shorter rounds consist of test steps.
    """
    step: Literal["first", "last"] = "first"
    """Steps of a round that are its test steps. first: all workers of a trainer have the same
    parameters on the first step (close to the same if streaming or residuals in the parameters
    leave them diverged), and are close together on the next ones. last: the step after the
    tests has the new batch, as in DDP-Norm; for trainers that have one worker, and never merge."""

    def __post_init__(self) -> None:
        require_range(self, "groups", at_least=2)
        require_range(self, "steps", at_least=1)
        require_choices(self)


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The rule for a trainer's batch, its micro-batches, and its split over workers."""

    rule: BatchRule = field(default_factory=ConstantBatch)
    """The batch rule, for instance `NormTest`."""
    guards: BatchGuards = field(default_factory=BatchGuards)
    """First batch and limits around the rule."""
    test: GradientTest = field(default_factory=GradientTest)
    """Settings of the statistics that the rule needs."""
    switch: SwitchMode = field(default_factory=SwitchMode)
    """The largest micro-batch that fits, and the rule for accumulation."""
    shares: Shares = field(default_factory=EqualShares)
    """Split of the batch over the trainer's workers."""

    def __post_init__(self) -> None:
        require_objects(self)


@dataclass(frozen=True, kw_only=True)
class OuterMemory:
    """Place of the tensors that a trainer needs only at syncs."""

    on_host: bool = setting(False, resume="free")
    """Keep global parameters, outer optimizer state and residuals (what syncs have left unsent) in
    host memory. The device then holds one fragment at a time, or one for each trainer if fragments
    are in flight."""

    def place(self, device: torch.device) -> torch.device | str:
        """Place of what belongs to tensors on this device."""
        return "cpu" if self.on_host else device

    def off_device(self, device: str) -> bool:
        """True if its tensors are in other memory than that of a device of this type."""
        return self.on_host and device != "cpu"


@dataclass(frozen=True, kw_only=True)
class SyncWeights:
    """The weights of workers in a sync."""

    weights: Literal["samples", "equal"] = "samples"
    """Weight of a worker in a sync. samples: its share of the samples that its trainer's workers
    have trained on; equal: that of each other worker, however many samples it took."""

    def __post_init__(self) -> None:
        require_choices(self)

    def of(self, samples: Mapping[int, float]) -> Mapping[int, float]:
        """A positive number for each worker, to which its weight is in proportion.

        samples: Of each worker, by id.
        """
        return samples if self.weights == "samples" else dict.fromkeys(samples, 1.0)


@dataclass(frozen=True, kw_only=True)
class Syncing:
    """Settings of the sync between the workers of a trainer."""

    outer: OuterFactory | None
    """Builds the outer optimizer; None: the workers' mean becomes the global parameters."""
    wire: WireFormat | None = None
    """Wire format of pseudo-gradients; None: they are sent uncompressed."""
    feedback: Feedback = field(default_factory=Feedback)
    """Error feedback: the treatment of values that the wire format leaves unsent."""
    streaming: Streaming = field(default_factory=Streaming)
    """The schedule of syncs within a round."""
    memory: OuterMemory = field(default_factory=OuterMemory)
    """Place of the global parameters."""
    weights: SyncWeights = field(default_factory=SyncWeights)
    """The weights of a trainer's workers."""

    def __post_init__(self) -> None:
        rate = self.outer if isinstance(self.outer, float) else 0.7
        require(
            self.outer is None or callable(self.outer),
            "outer must build the outer optimizer, or be None for the mean of the workers, got "
            f"{self.outer!r}; write outer=adloco.OuterOptimizer(lr={rate})",
        )
        require(
            self.wire is None or (hasattr(self.wire, "decode") and not isinstance(self.wire, type)),
            f"wire must be a wire format or None, got {self.wire!r}; write wire=adloco.Int4()",
        )
        require_objects(self)

    @property
    def momentum_wire(self) -> WireFormat | None:
        """Wire format of outer momentum, in a merge; None: uncompressed."""
        return at_least(self.wire, Int4())

    @property
    def parameter_wire(self) -> WireFormat | None:
        """Wire format of parameters themselves, in a merge; None: uncompressed."""
        return at_least(self.wire, Int8())

    @property
    def residuals(self) -> Literal["none", "params"]:
        """Place where workers keep residuals (values that a sync leaves unsent); none: not kept."""
        return self.feedback.place(self.wire)

    @property
    def residuals_in(self) -> OuterMemory | None:
        """Memory of residuals; None if workers keep none."""
        return None if self.residuals == "none" else self.memory

    def diverges(self, num_workers: int) -> bool:
        """True if this many workers of a trainer have different parameters between rounds."""
        return self.streaming.replicas_diverge or (self.residuals == "params" and num_workers > 1)


@dataclass(frozen=True, kw_only=True)
class Merging:
    """The settings of merges."""

    policy: MergePolicy = field(default_factory=NoMerge)
    """Selects the trainers that merge."""
    fates: MergeFates = field(default_factory=MergeFates)
    """Treatment of parameters, momentum, inner state, streams and requests at a merge."""

    def __post_init__(self) -> None:
        require_objects(self)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Settings of the workers' computation."""

    autocast: torch.dtype | None = None
    """Data type of mixed precision (torch.autocast); None: no mixed precision."""
    compile: bool | Literal["auto"] = False
    """Compile the model and its loss with torch.compile; auto: see `building.is_compiled`."""
    seed: int = 0
    """Seed of the dropout masks."""
    on_nonfinite: OnNonFinite = "stop"
    """Action of a worker whose numbers are not finite."""
    clock: Callable[[], float] = time.monotonic
    """() -> seconds since some fixed moment; measures training and the syncs that it waits for."""

    def __post_init__(self) -> None:
        require(
            self.autocast is None or self.autocast == torch.bfloat16,
            "autocast must be None or torch.bfloat16, because losses are not scaled and float16 "
            f"turns small gradients into 0, got {self.autocast}",
        )
        require_choices(self)
