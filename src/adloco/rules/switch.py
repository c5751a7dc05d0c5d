"""Switch mode: from a requested batch to micro-batches that fit (AdLoCo section 3.3, arXiv
2508.18182; DESIGN section 4).

As long as the request is at most n times what fits in one pass, a worker takes one micro-batch,
clipped at what fits; once it is more, the worker accumulates gradients over balanced micro-batches,
so that an update costs several passes but carries the whole request.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One worker's inner step: its micro-batches, in samples. The ranks that serve the worker take
    them in turns.
    """

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
        return math.ceil(len(self.micro_batches) / self.ranks)

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch, which decides the memory."""
        return max(self.micro_batches)

    def in_groups(self, count: int) -> "BatchPlan":
        """A plan of the same samples in groups, for a step on which gradient statistics are taken.

        There are as many groups as the smallest multiple of `count` that is not below the number
        of micro-batches, or one for each sample if there are fewer samples than that. So the
        groups of a plan of `SwitchMode` depend on worker_batch, on what fits in one pass and on
        `count`, but not on the ranks, for all numbers of ranks that divide `count`. Where the
        ranks do not divide it, their least common multiple takes the place of `count`: the groups
        are those of one rank that is asked for so many. worker_batch itself can depend on the
        ranks: a plan adds samples so that every rank has work in every pass (rounded_up).

        Where each group is one sample, a rank may be without one in the last pass (see `of_rank`).
        """
        unit = math.lcm(count, self.ranks)
        multiple = unit * math.ceil(len(self.micro_batches) / unit)
        groups = min(multiple, self.worker_batch)
        return replace(self, micro_batches=balanced(self.worker_batch, groups))

    def at_most(self, size: int) -> "BatchPlan":
        """A plan of the same samples in micro-batches of that size at most; this plan if it fits.

        Where there are fewer samples than ranks, each rank has one.
        """
        if self.micro_batch <= size:
            return self
        parts = math.ceil(self.worker_batch / (size * self.ranks)) * self.ranks
        samples = max(self.worker_batch, parts)  # Every rank has work in every pass.
        return replace(
            self,
            micro_batches=balanced(samples, parts),
            rounded_up=self.rounded_up + samples - self.worker_batch,
        )

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """(offset, samples) of the micro-batches that this rank takes, one in each pass.

        (0, 0) is a pass in which there is no group for this rank. It must take part all the same,
        as the ranks reduce gradients together: with the first sample of the step, weighted by 0.
        """
        offsets = [0, *accumulate(self.micro_batches)]
        own = list(zip(offsets, self.micro_batches, strict=False))[rank :: self.ranks]
        return own + [(0, 0)] * (self.accumulation_steps - len(own))


@dataclass(frozen=True, kw_only=True)
class SwitchMode:
    """When a worker accumulates gradients."""

    max_micro_batch: int | Literal["auto"] = 8
    """Samples that fit in one forward and backward pass of a rank (b_max), on each of a worker's
    ranks; auto: found by real steps at the start.
    """
    pass_limit: int = 0
    """Samples of one pass at most, should b_max not fit after all; 0: b_max. Batches and what
    decides them stay as they are.
    """
    multiplier: float = 2.0
    """n: accumulate once a trainer's request exceeds n times what fits in one pass of its workers;
    below, clip at what fits.
    """
    mode: Literal["switch", "always", "never"] = "switch"
    """switch: as above; always: accumulate as soon as the request does not fit; never: always clip.
    """

    def __post_init__(self) -> None:
        positive = self.max_micro_batch == "auto" or self.max_micro_batch > 0
        require(positive, f"max_micro_batch must be > 0 or auto, got {self.max_micro_batch}")
        require(self.pass_limit >= 0, f"pass_limit must be >= 0, got {self.pass_limit}")
        require(self.multiplier >= 1, f"multiplier must be >= 1, got {self.multiplier}")
        require(
            self.mode in ("switch", "always", "never"),
            f"mode must be switch, always or never, got {self.mode!r}",
        )

    @property
    def b_max(self) -> int:
        """Samples that fit, known by now."""
        require(
            self.max_micro_batch != "auto",
            "max_micro_batch auto is for recipes, where a probe finds it; give a number",
        )
        return int(self.max_micro_batch)

    def clipped(self, requested: int, workers: int = 1, ranks: int = 1) -> int:
        """What a trainer with these workers, each served by that many ranks, takes of its request:
        all of it, or what fits in one pass.
        """
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
        """Micro-batches for a worker that takes `share` samples (in mode never, as many as fit),
        served by that many ranks.
        """
        if self.mode == "never":
            share = min(share, ranks * self.b_max)
        parts = math.ceil(share / (ranks * self.b_max)) * ranks
        samples = max(share, parts)
        plan = BatchPlan(
            micro_batches=balanced(samples, parts), ranks=ranks, rounded_up=samples - share
        )
        return plan.at_most(self.pass_limit) if self.pass_limit else plan


def smallest_share(groups: int, ranks: int) -> int:
    """The fewest samples of a worker that `BatchPlan.in_groups` splits into so many groups.

    Every rank has as many groups: with 3 ranks, 4 groups take 6 samples. With more ranks than
    groups, `SwitchMode.plan` adds what is missing for a sample on every rank.
    """
    return math.ceil(groups / ranks) * ranks if ranks < groups else groups


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most one, the larger first: 17 in 3 is (6,
    6, 5).
    """
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)
