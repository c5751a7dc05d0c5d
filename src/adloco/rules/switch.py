"""Switch mode: from a requested batch to micro-batches that fit (AdLoCo section 3.3, arXiv 2508.18182; DESIGN section 4).

As long as the request is at most n times what fits in one pass, a worker takes one micro-batch, clipped at what fits; once it is more, the worker
accumulates gradients over balanced micro-batches, so that an update costs several passes but carries the whole request.
"""

import math
from dataclasses import dataclass
from typing import Literal

from adloco.rules.checks import require


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One worker's inner step: its micro-batches, in samples."""

    micro_batches: tuple[int, ...]

    @property
    def worker_batch(self) -> int:
        return sum(self.micro_batches)

    @property
    def accumulation_steps(self) -> int:
        return len(self.micro_batches)

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch, which decides the memory."""
        return max(self.micro_batches)

    def in_groups(self, at_least: int) -> "BatchPlan":
        """The same samples in at least this many groups (or one per sample), for a step on which statistics are taken."""
        groups = min(self.worker_batch, max(self.accumulation_steps, at_least))
        return self if groups == self.accumulation_steps else BatchPlan(micro_batches=balanced(self.worker_batch, groups))


@dataclass(frozen=True, kw_only=True)
class SwitchMode:
    """When a worker accumulates gradients."""

    max_micro_batch: int = 8
    """Samples that fit in one forward and backward pass of a worker (b_max)."""
    multiplier: float = 2.0
    """n: accumulate once a worker's share of the request exceeds n * max_micro_batch; below, clip at max_micro_batch."""
    mode: Literal["switch", "always", "never"] = "switch"
    """switch: as above; always: accumulate as soon as the share does not fit; never: always clip."""

    def __post_init__(self) -> None:
        require(self.max_micro_batch > 0, f"switch.max_micro_batch must be > 0, got {self.max_micro_batch}")
        require(self.multiplier >= 1, f"switch.multiplier must be >= 1, got {self.multiplier}")
        require(self.mode in ("switch", "always", "never"), f"switch.mode must be switch, always or never, got {self.mode!r}")

    def plan(self, share: int) -> BatchPlan:
        """Micro-batches for a worker whose share of the trainer's request is `share` samples."""
        threshold = {"switch": self.multiplier * self.max_micro_batch, "always": self.max_micro_batch, "never": math.inf}[self.mode]
        if share <= threshold:
            return BatchPlan(micro_batches=(min(share, self.max_micro_batch),))
        return BatchPlan(micro_batches=balanced(share, math.ceil(share / self.max_micro_batch)))


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most one, the larger first: 17 in 3 is (6, 6, 5)."""
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def worker_shares(requested: int, num_workers: int, minimum: int) -> tuple[int, ...]:
    """A trainer's request split over its workers, each at least `minimum` samples."""
    return balanced(max(requested, num_workers * minimum), num_workers)
