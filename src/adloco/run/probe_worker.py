"""A worker like those of the run, for probes: it trains steps of any size, and is then discarded.
With it, the samples that one island (a worker with its ranks) trains in a second are measured.

It is built as the run does (sharded, replicated), on a whole island: all ranks call it alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from threading import Event

from adloco.algorithms.building import is_compiled
from adloco.algorithms.method import Execution, Source
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.device_memory import free_memory, ran_out_of_memory
from adloco.errors import OutOfMemoryError
from adloco.rules.switch import BatchPlan
from adloco.run.memory_use import forget_peak, held_bytes, usage
from adloco.run.opened import Opened


class ProbeWorker:
    """A worker whose memory and seconds are measured while it trains steps."""

    def __init__(
        self, opened: Opened, data: Source, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: () -> seconds since some fixed moment."""
        recipe, placement, builder = opened.recipe, opened.placement, opened.builder
        self._device = placement.device
        self._placement, self._ranks = placement, placement.ranks_per_worker
        free_memory(self._device)
        self._before = held_bytes(self._device)
        problem = opened.problem(data)
        settings = InnerSettings(
            problem=problem,
            method=recipe.method,
            inner=recipe.inner,
            batching=replace(recipe.batching, test=replace(recipe.test, steps=1, step="first")),
            execution=Execution(autocast=opened.precision, seed=recipe.run.seed, clock=clock),
            device=self._device,
            syncing=recipe.syncing,
        )
        model = builder()
        compile = is_compiled(recipe.run.compile, model, problem, placement)
        engine = placement.engine(model, compile, builder.filling)
        self._worker = Worker(0, model, settings, engine)
        # The first step of a round may measure gradient statistics, with smaller micro-batches but
        # perhaps with a second copy of the gradients; the second step is a plain one.
        self._steps = 2 if recipe.batch.fewest_groups > 1 else 1
        self._train(1, [self._steps])  # The first step creates the optimizer state.

    def peak(self, size: int) -> tuple[int, float]:
        """(peak bytes, seconds) of a step with micro-batches of this size; OutOfMemoryError if
        memory ran out.
        """
        self._free()
        forget_peak(self._device)
        (seconds,) = self._train(size, [self._steps])
        return usage(self._device)[0] - self._before, seconds / self._steps

    def step_seconds(self, size: int, count: int, passes: int = 1) -> list[float]:
        """Seconds of each of `count` steps of so many passes, with micro-batches of this size on
        every rank; OutOfMemoryError if memory ran out.

        A plain step that warms up comes before them, and before it the step that measures gradient
        statistics, if the recipe's rule needs any.
        """
        self._free()
        return self._train(size, range(self._steps, self._steps + count + 1), passes)[1:]

    def _free(self) -> None:
        # A pass that is captured already would take no memory that is counted.
        self._worker.free_graphs()
        free_memory(self._device)

    def _train(self, size: int, ends: Sequence[int], passes: int = 1) -> list[float]:
        """Train a round, in parts that end after so many steps; return the seconds of each part."""
        plan = BatchPlan(micro_batches=(size,) * self._ranks * passes, ranks=self._ranks)
        task = RoundTask(
            trainer=0,
            plan=plan,
            final_plan=plan,
            inner_steps=ends[-1],
            first_step=0,
            lr_factor=lambda step: 0.0,  # The same work, and no loss that diverges.
            start=(),
        )
        self._worker.begin_round()
        self._worker.halving.limit = 0
        until = [0.0]
        for end in ends:
            advance = partial(self._worker.advance, task, halted=Event())
            apart = self._worker.engine.compiles
            try:
                self._placement.map(advance, [end], apart=apart)
            except RuntimeError as error:  # In an update: passes are repeated.
                if not ran_out_of_memory(error):
                    raise
                raise OutOfMemoryError("the worker's update needs more memory") from error
            until.append(self._worker.round.busy_seconds)
        if self._worker.halving.limit:
            raise OutOfMemoryError("the worker repeated the step with smaller micro-batches")
        return [after - before for before, after in pairwise(until)]


STEPS = 20
"""Steps that are measured at each micro-batch."""
NORMAL_QUARTILES = 1.349
"""Interquartile range of a normal distribution with a standard deviation of 1."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The measured speed of one island."""

    ranks: int
    """Ranks of the island; in a step each of them trains on one micro-batch."""
    step_seconds: Mapping[int, Sequence[float]]
    """Micro-batch in samples -> seconds of each measured step."""
    of_two_passes: Sequence[float]
    """Seconds of each measured step of two passes with the largest micro-batch."""

    @property
    def median_seconds(self) -> dict[int, float]:
        """Micro-batch in samples -> seconds of a step, by rising micro-batch."""
        return {size: median(self.step_seconds[size]) for size in sorted(self.step_seconds)}

    @property
    def samples_per_second(self) -> dict[int, float]:
        """Samples of one pass of all ranks -> samples per second, from the median step."""
        return {
            self.ranks * size: self.ranks * size / each
            for size, each in self.median_seconds.items()
        }

    @property
    def update_seconds(self) -> float:
        """Seconds of a step besides its passes: twice those of a step of one pass less those of one
        of two. Not more than nine tenths of the shortest step.
        """
        each = self.median_seconds
        found = 2 * each[max(each)] - median(self.of_two_passes)
        return min(max(found, 0.0), 0.9 * min(each.values()))

    @property
    def jitter(self) -> float:
        """Standard deviation of a step's seconds over their mean, at the largest micro-batch.

        It is the interquartile range / 1.349 over the median: what it would be if the seconds were
        normally distributed. A few steps that something else has held up do not change it.
        """
        seconds = self.step_seconds[max(self.step_seconds)]
        low, middle, high = quantiles(seconds, method="inclusive")
        return (high - low) / NORMAL_QUARTILES / middle


def doublings(largest: int) -> list[int]:
    """The micro-batches 1, 2, 4, ... below the largest, and the largest."""
    return [*(2**power for power in range((largest - 1).bit_length())), largest]


def measure_throughput(
    opened: Opened,
    micro_batches: Sequence[int],
    *,
    on_micro_batch: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> Throughput:
    """Measure the steps of one island on the run's data.

    Every rank trains. If they have several islands, the figures are those of the first.

    Args:
        micro_batches: The sizes to measure, in samples of each rank.
        on_micro_batch: Called with each size before it is measured.

    Raises:
        ValueError: A size does not fit in memory, or there is too little data.
    """
    worker, placement = ProbeWorker(opened, opened.train_source(), clock), opened.placement
    step_seconds, of_two_passes = {}, list[float]()
    for size in micro_batches:
        on_micro_batch(size)
        try:
            step_seconds[size] = worker.step_seconds(size, STEPS)
            if size == max(micro_batches):
                of_two_passes = worker.step_seconds(size, STEPS, passes=2)
        except OutOfMemoryError as error:
            raise ValueError(
                f"memory ran out with a micro-batch of {size}; leave it out of --micro-batches, or "
                "take a smaller model or context"
            ) from error
    # The ranks of an island wait for each other in every step, so that all measure the same.
    step_seconds, of_two_passes = placement.agree((step_seconds, of_two_passes))
    return Throughput(
        ranks=placement.ranks_per_worker, step_seconds=step_seconds, of_two_passes=of_two_passes
    )
