"""What a run is told: the problem, and the method's sections, each a frozen dataclass.

A section of a recipe is handed down as it is to the mechanism that reads it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adloco.distributed.parallel.layers import Fill
from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.controller import BatchGuards
from adloco.rules.shares import EqualShares, Shares
from adloco.rules.switch import SwitchMode

LossFunction = Callable[[Any, Any], Tensor]
"""(model, batch) -> mean loss over the batch's samples."""


class Source(Protocol):
    """Data as numbered samples in numbered streams (DESIGN section 3, seam 2)."""

    @property
    def num_streams(self) -> int:
        """How many disjoint streams there are."""
        ...

    def read(self, stream: int, position: int, count: int) -> Any:
        """Samples position .. position + count - 1 of a stream, as a batch.

        What they are depends on these numbers and a seed alone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained: a model, its loss and the data."""

    build_model: Callable[[], nn.Module]
    """Makes the model. Called once on each rank; every worker starts from a copy of rank 0's."""
    loss_fn: LossFunction
    """(model, batch) -> mean loss over the batch's samples. It may call `model`, which can be a
    wrapper, and should read nothing else of it."""
    data: Source
    """At least one stream for each worker."""
    fill: Fill | None = None
    """For a model on the meta device: gives values to a part of it, so that no rank holds the whole
    of a sharded one; see `distributed.parallel.layers.Fill`."""
    tokens_per_sample: int = 1
    """Tokens of a sample, for schedules that run on tokens."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Trainers, workers and rounds."""

    num_trainers: int = 1
    """Independent trajectories at the start (k)."""
    workers_per_trainer: int = 1
    """Model copies that serve each of them (M)."""
    sync_every: int = 20
    """Inner optimizer steps per round (H)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm at every inner step; 0: never."""

    def __post_init__(self) -> None:
        require(self.num_trainers >= 1, f"num_trainers must be >= 1, got {self.num_trainers}")
        require(
            self.workers_per_trainer >= 1,
            f"workers_per_trainer must be >= 1, got {self.workers_per_trainer}",
        )
        require(self.sync_every >= 1, f"sync_every must be >= 1, got {self.sync_every}")
        require(self.max_grad_norm >= 0, f"max_grad_norm must be >= 0, got {self.max_grad_norm}")

    @property
    def num_workers(self) -> int:
        """Workers of the run."""
        return self.num_trainers * self.workers_per_trainer


@dataclass(frozen=True, kw_only=True)
class GradientTest:
    """How gradient statistics are taken, for batch rules that need them."""

    groups: int = 4
    """Groups into which a worker splits the batch of a test step, over all its ranks (a multiple,
    if it accumulates more). Unbiased inner-product tests take a multiple of 4."""
    every: int = 0
    """Inner steps from one test to the next; 0: on the first of each round. The batch changes at
    the end of a round."""

    def __post_init__(self) -> None:
        require(self.groups >= 2, f"groups must be >= 2, got {self.groups}")
        require(self.every >= 0, f"every must be >= 0, got {self.every}")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How a trainer's batch is decided and carried out."""

    rule: BatchRule = field(default_factory=ConstantBatch)
    """The batch rule, for instance `NormTest`."""
    guards: BatchGuards = field(default_factory=BatchGuards)
    """First batch, limits and smoothing around the rule."""
    test: GradientTest = field(default_factory=GradientTest)
    """How the statistics for the rule are taken."""
    switch: SwitchMode = field(default_factory=SwitchMode)
    """What fits, and when gradients are accumulated."""
    shares: Shares = field(default_factory=EqualShares)
    """How the batch is split over the trainer's workers."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How workers compute."""

    autocast: torch.dtype | None = None
    """Data type of mixed precision."""
    compile: bool = False
    """Compile the model with torch.compile."""
    seed: int = 0
    """Seed of dropout."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since any fixed moment, for what a round's report says about time."""
