"""Switch mode: from a requested batch to micro-batches that fit (AdLoCo section 3.3, arXiv 2508.18182; DESIGN section 4).

As long as the request is at most n times what fits in one pass, a worker takes one micro-batch, clipped at what fits; once it is more, the worker
accumulates gradients over balanced micro-batches, so that an update costs several passes but carries the whole request.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One worker's inner step: its micro-batches, in samples. The ranks that serve the worker take them in turns."""

    micro_batches: tuple[int, ...]
    ranks: int = 1
    """Ranks that serve the worker; each takes part in every pass, with one micro-batch."""
    rounded_up: int = 0
    """Samples that were added so that every rank has work in every pass."""

    @property
    def worker_batch(self) -> int:
        return sum(self.micro_batches)

    @property
    def accumulation_steps(self) -> int:
        """Passes of each rank: worker_batch is about ranks x accumulation_steps x micro_batch."""
        return len(self.micro_batches) // self.ranks

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch, which decides the memory."""
        return max(self.micro_batches)

    def in_groups(self, count: int) -> "BatchPlan":
        """The same samples in groups for a step on which statistics are taken: a multiple of `count`, not fewer than micro-batches.

        Where there are too few samples for that, a divisor of `count`, or one sample in each group. So a plan for 1, 2 or 4 ranks has the same groups
        if these numbers divide `count`; where the ranks do not, count is made a multiple of them.
        """
        unit = math.lcm(count, self.ranks)
        passes = len(self.micro_batches)
        divisors = [parts for parts in range(unit, 1, -1) if unit % parts == 0 and parts % self.ranks == 0]
        wanted = [unit * math.ceil(passes / unit), *divisors, *([self.worker_batch] if self.ranks == 1 else [])]
        groups = next((parts for parts in wanted if passes <= parts <= self.worker_batch), passes)
        return replace(self, micro_batches=balanced(self.worker_batch, groups))

    def at_most(self, size: int) -> "BatchPlan":
        """The same samples (one for each rank, if there are fewer) in micro-batches of that size or smaller, as they are if they fit."""
        if self.micro_batch <= size:
            return self
        parts = math.ceil(self.worker_batch / (size * self.ranks)) * self.ranks
        samples = max(self.worker_batch, parts)  # Every rank has work in every pass.
        return replace(self, micro_batches=balanced(samples, parts), rounded_up=self.rounded_up + samples - self.worker_batch)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """(offset, samples) of the micro-batches that this rank takes, one in each pass."""
        offsets = [0, *accumulate(self.micro_batches)]
        return list(zip(offsets, self.micro_batches, strict=False))[rank :: self.ranks]


@dataclass(frozen=True, kw_only=True)
class SwitchMode:
    """When a worker accumulates gradients."""

    max_micro_batch: int | Literal["auto"] = 8
    """Samples that fit in one forward and backward pass of a rank (b_max), on each of a worker's ranks; auto: found by real steps at the start."""
    pass_limit: int = 0
    """Samples of one pass at most, should b_max not fit after all; 0: b_max. Batches and what decides them stay as they are."""
    multiplier: float = 2.0
    """n: accumulate once a trainer's request exceeds n times what fits in one pass of its workers; below, clip at what fits."""
    mode: Literal["switch", "always", "never"] = "switch"
    """switch: as above; always: accumulate as soon as the request does not fit; never: always clip."""

    def __post_init__(self) -> None:
        positive = self.max_micro_batch == "auto" or self.max_micro_batch > 0
        require(positive, f"switch.max_micro_batch must be > 0 or auto, got {self.max_micro_batch}")
        require(self.pass_limit >= 0, f"switch.pass_limit must be >= 0, got {self.pass_limit}")
        require(self.multiplier >= 1, f"switch.multiplier must be >= 1, got {self.multiplier}")
        require(self.mode in ("switch", "always", "never"), f"switch.mode must be switch, always or never, got {self.mode!r}")

    @property
    def b_max(self) -> int:
        """Samples that fit, known by now."""
        require(self.max_micro_batch != "auto", "switch.max_micro_batch auto is for recipes, where a probe finds it; give a number")
        return int(self.max_micro_batch)

    def clipped(self, requested: int, workers: int = 1, ranks: int = 1) -> int:
        """What a trainer with these workers, each served by that many ranks, takes of its request: all of it, or what fits in one pass."""
        fits = workers * ranks * self.b_max
        return min(requested, fits) if requested <= self._threshold(workers, ranks) else requested

    def most_per_worker(self, requested: int, workers: int, ranks: int) -> int | None:
        """Most samples that one worker may take of a trainer's request: what fits in one pass.

        None where the trainer accumulates, so that nothing has to fit in one pass. The arguments
        are those of `clipped`, whose result fits in the passes of all workers together.
        """
        clips = self.mode != "always" and requested <= self._threshold(workers, ranks)
        return ranks * self.b_max if clips else None

    def _threshold(self, workers: int, ranks: int) -> float:
        """The largest request that is clipped at what fits."""
        fits = workers * ranks * self.b_max
        return {"switch": self.multiplier * fits, "always": fits, "never": math.inf}[self.mode]

    def plan(self, share: int, ranks: int = 1) -> BatchPlan:
        """Micro-batches for a worker that takes `share` samples (in mode never, as many as fit), served by that many ranks."""
        if self.mode == "never":
            share = min(share, ranks * self.b_max)
        parts = math.ceil(share / (ranks * self.b_max)) * ranks
        samples = max(share, parts)
        plan = BatchPlan(micro_batches=balanced(samples, parts), ranks=ranks, rounded_up=samples - share)
        return plan.at_most(self.pass_limit) if self.pass_limit else plan


def smallest_share(groups: int, ranks: int) -> int:
    """The fewest samples of a worker that `BatchPlan.in_groups` splits into so many groups.

    Every rank has as many groups: with 3 ranks, 4 groups take 6 samples. With more ranks than
    groups, `SwitchMode.plan` adds what is missing for a sample on every rank.
    """
    return math.ceil(groups / ranks) * ranks if ranks < groups else groups


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most one, the larger first: 17 in 3 is (6, 6, 5)."""
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)
