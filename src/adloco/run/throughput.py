"""Measures how many samples one island (a worker with its ranks) trains in a second, at each
micro-batch, and how much the seconds of its steps vary.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from adloco.errors import OutOfMemoryError
from adloco.run.opened import Opened
from adloco.run.probe_worker import ProbeWorker

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
        opened: The recipe, with its data.
        micro_batches: The sizes to measure, in samples of each rank.
        on_micro_batch: Called with each size before it is measured.
        clock: () -> seconds since some fixed moment.

    Raises:
        ValueError: A size does not fit in memory, or there is too little data.
    """
    worker, placement = ProbeWorker(opened, opened.train_source(), clock), opened.placement
    step_seconds = {}
    for size in micro_batches:
        on_micro_batch(size)
        try:
            step_seconds[size] = worker.step_seconds(size, STEPS)
        except OutOfMemoryError as error:
            raise ValueError(
                f"memory ran out with a micro-batch of {size}; leave it out of --micro-batches, or "
                "take a smaller model or context"
            ) from error
    # The ranks of an island wait for each other in every step, so that all measure the same.
    return Throughput(ranks=placement.ranks_per_worker, step_seconds=placement.agree(step_seconds))
