"""Switch mode: from a requested batch to micro-batches that fit in memory (AdLoCo section 3.3,
arXiv 2508.18182; docs/method.md).

A pass is one forward and backward computation. The decision is a trainer's: as long as its request
is at most n times what fits in one pass of all its workers, the request is clipped at what fits,
and each worker takes one micro-batch per rank. Above that, its workers accumulate gradients over
balanced micro-batches: an update costs several passes, but is computed from the whole request. So
it is in mode `switch` without `pass_limit`, which splits micro-batches further.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from adloco.errors import require, require_choices, require_range, require_setting
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The micro-batches of one worker's inner step.

    Rank r of the D ranks that serve the worker takes the micro-batches r, r + D, r + 2 D, ...
    """

    micro_batches: tuple[int, ...]
    """Samples in each micro-batch."""
    ranks: int = 1
    """Ranks that serve the worker (D). Each takes part in every pass, with one micro-batch."""
    rounded_up: int = 0
    """Samples that were added to the worker's share so that every rank has work in every pass."""

    @property
    def worker_batch(self) -> int:
        """Samples of the inner step."""
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
        """A plan with the same samples in groups, for a step that takes gradient statistics.

        The number of groups is the smallest multiple of `count` that is at least the number of
        micro-batches. If there are fewer samples than that, each sample is a group.

        If the number of ranks divides `count`, the groups of a plan of `SwitchMode` depend only on
        worker_batch, on what fits in one pass and on `count`. Otherwise the least common multiple
        of `count` and the number of ranks replaces `count`. worker_batch itself can depend on the
        ranks, because a plan adds samples so that every rank has work in every pass (rounded_up).

        If each sample is a group, a rank may have no group in the last pass (see `of_rank`).
        """
        unit = math.lcm(count, self.ranks)
        multiple = unit * math.ceil(len(self.micro_batches) / unit)
        groups = min(multiple, self.worker_batch)
        return replace(self, micro_batches=balanced(self.worker_batch, groups))

    def at_most(self, size: int) -> "BatchPlan":
        """A plan with the same samples in micro-batches of at most this size.

        It is this plan if its micro-batches are small enough. Otherwise samples are added if there
        are too few for every rank to have one in every pass.
        """
        if self.micro_batch <= size:
            return self
        parts = math.ceil(self.worker_batch / (size * self.ranks)) * self.ranks
        samples = max(self.worker_batch, parts)
        return replace(
            self,
            micro_batches=balanced(samples, parts),
            rounded_up=self.rounded_up + samples - self.worker_batch,
        )

    def with_samples(self, samples: int) -> "BatchPlan":
        """A plan of other samples, in micro-batches that are no larger than these.

        No samples are added: ranks that have no micro-batch in the last pass take part as `of_rank`
        says.
        """
        passes = math.ceil(samples / (self.ranks * self.micro_batch))
        parts = min(samples, passes * self.ranks)
        return replace(self, micro_batches=balanced(samples, parts), rounded_up=0)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """(offset, samples) of this rank's micro-batch in each pass.

        The offset counts samples from the first one of the step. (0, 0) stands for a pass in which
        this rank has no group. The rank must still take part, because the ranks reduce gradients
        together; it computes the first sample of the step, weighted by 0, which running statistics
        (BatchNorm) see once more.
        """
        offsets = [0, *accumulate(self.micro_batches)]
        own = list(zip(offsets, self.micro_batches, strict=False))[rank :: self.ranks]
        return own + [(0, 0)] * (self.accumulation_steps - len(own))


@dataclass(frozen=True, kw_only=True)
class SwitchMode:
    """Decides when a worker accumulates gradients, from the samples that fit in one pass."""

    max_micro_batch: int | Literal["auto"] = setting(
        8, aliases=("micro_batch_size", "per_device_train_batch_size")
    )
    """Samples that fit in one forward and backward pass on one rank (b_max); auto: measured with
    real steps at the start of the run.
    """
    pass_limit: int = setting(0, resume="free")
    """Cap on micro-batches, for when b_max does not fit after all; 0: none below b_max. Batches
    stay the same, in more micro-batches, and test steps may have more groups.
    """
    multiplier: float = setting(2.0, aliases=("n",))
    """n: accumulate if a trainer's requested batch exceeds n times what fits in one pass of its
    workers; otherwise clip the request at what fits."""
    mode: Literal["switch", "always", "never"] = "switch"
    """switch: decide by the multiplier; always: accumulate whenever the request does not fit;
    never: always clip at what fits.
    """

    def __post_init__(self) -> None:
        require_choices(self)
        positive = self.max_micro_batch == "auto" or self.max_micro_batch > 0
        require_setting(positive, self, "max_micro_batch", "must be > 0 or auto")
        require_range(self, "pass_limit", at_least=0)
        require_range(self, "multiplier", at_least=1)

    @property
    def b_max(self) -> int:
        """Samples that fit in one pass on one rank; ValueError if a probe has yet to find it."""
        require(
            self.max_micro_batch != "auto",
            "switch.max_micro_batch must be a number here, got auto; only the run of a recipe "
            "measures it",
        )
        return int(self.max_micro_batch)

    @property
    def at_once(self) -> int:
        """Largest micro-batch: b_max, or the cap on micro-batches if that is less."""
        return min(self.b_max, self.pass_limit or self.b_max)

    def at_most(self, limit: int) -> "SwitchMode":
        """This switch mode with a cap on micro-batches, if it has no lower one; 0: no cap."""
        caps = [cap for cap in (self.pass_limit, limit) if cap > 0]
        return replace(self, pass_limit=min(caps, default=0))

    def clipped(self, requested: int, workers: int = 1, ranks: int = 1) -> int:
        """Samples per inner step that a trainer takes of its request, over all its workers.

        ranks: Ranks that serve each worker.

        Returns:
            The whole request, or what fits in one pass of all workers if that is less and the
            trainer does not accumulate.
        """
        most = self.most_per_worker(requested, workers, ranks)
        return requested if most is None else min(requested, workers * most)

    def most_per_worker(self, requested: int, workers: int, ranks: int) -> int | None:
        """Most samples that one worker may take: what fits in one pass of its ranks.

        None if the trainer accumulates, because nothing has to fit in one pass then. The arguments
        are those of `clipped`.
        """
        if self.mode == "always":
            return None
        fits = ranks * self.b_max
        accumulates = self.mode == "switch" and requested > self.multiplier * (workers * fits)
        return None if accumulates else fits

    def plan(self, share: int, ranks: int = 1) -> BatchPlan:
        """The micro-batches of a worker's inner step.

        share: Samples of the worker. In mode never, it takes at most what fits in one pass.
        """
        if self.mode == "never":
            share = min(share, ranks * self.b_max)
        parts = math.ceil(share / (ranks * self.at_once)) * ranks
        samples = max(share, parts)
        return BatchPlan(
            micro_batches=balanced(samples, parts), ranks=ranks, rounded_up=samples - share
        )


def smallest_share(groups: int, ranks: int) -> int:
    """The fewest samples that a worker needs for this many groups on a test step.

    Every rank has the same number of groups, so 4 groups on 3 ranks need 6 samples. With more ranks
    than groups, `SwitchMode.plan` adds the samples that are missing for one on every rank.
    """
    return math.ceil(groups / ranks) * ranks if ranks < groups else groups


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into `parts` whole numbers that differ by at most one, the larger first.

    For example, 17 in 3 parts is (6, 6, 5).
    """
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)
