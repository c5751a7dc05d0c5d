"""Costs and losses of syncs: of one sum (`SumStats`), and of a worker in a round (`SyncStats`)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from torch import Tensor

Clock = Callable[[], float]
"""() -> seconds since some fixed moment."""


@dataclass
class SumStats:
    """This rank's part of what one sum of pseudo-gradients cost and lost.

    Squared norms are taken after multiplication by the worker's weight.
    """

    wanted_sq: list[float]
    """Squared norm of each local worker's contribution before encoding."""
    sent_sq: list[float]
    """Squared norm of what each local worker sent."""
    error_sq: list[float]
    """Squared norm of the difference of the two."""
    total_sq: float = 0.0
    """This rank's part of the squared norm of the sum over all workers of what they sent.

    The parts of all ranks add up to the squared norm.
    """
    num_bytes: float = 0.0
    """Payload that the local workers sent."""
    transfer_seconds: float = 0.0
    """Seconds that the sum was in flight, filling included if it did not run in the background."""
    hidden_seconds: float = 0.0
    """The part of these seconds for which nobody waited."""

    @staticmethod
    def zero(num_workers: int) -> "SumStats":
        """Statistics of workers that sent nothing."""
        return SumStats([0.0] * num_workers, [0.0] * num_workers, [0.0] * num_workers)

    @staticmethod
    def lossless(sent_sq: Tensor) -> "SumStats":
        """Statistics of workers that sent without loss.

        sent_sq: The squared norms of what they sent, shape (workers,).
        """
        return SumStats(sent_sq.tolist(), sent_sq.tolist(), [0.0] * len(sent_sq))


@dataclass(frozen=True, kw_only=True)
class SyncStats:
    """Costs of a round's syncs to one worker; statistics of several syncs add up.

    Squared norms are taken after multiplication by the worker's weight.
    """

    wanted_sq: float = 0.0
    """Squared norm of its pseudo-gradients before encoding."""
    sent_sq: float = 0.0
    """Squared norm of what it sent."""
    error_sq: float = 0.0
    """Squared norm of the difference of the two."""
    total_sq: float = 0.0
    """This worker's part of the squared norm of the sum over its trainer's workers.

    The first worker of a process has the whole part of its process, the others 0.
    """
    num_bytes: float = 0.0
    """Payload of its reductions, in one direction; what leaves a worker for them can be more."""
    exposed_seconds: float = 0.0
    """Seconds that training stopped for syncs, averaged over the ranks that serve it."""
    hidden_seconds: float = 0.0
    """Seconds that fragments were in flight while training continued."""
    transfer_seconds: float = 0.0
    """Seconds that fragments were in flight, hidden or not."""
    peak_bytes_per_second: float = 0.0
    """`num_bytes` over `transfer_seconds` of the fastest fragment."""

    def __add__(self, other: "SyncStats") -> "SyncStats":
        sums = [
            mine + theirs
            for mine, theirs in zip(self.to_numbers(), other.to_numbers(), strict=True)
        ]
        peak = max(self.peak_bytes_per_second, other.peak_bytes_per_second)
        return SyncStats.from_numbers([*sums[:-1], peak])

    def to_numbers(self) -> list[float]:
        """The statistics as numbers, in which form ranks gather them in float64."""
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> "SyncStats":
        return SyncStats(
            **{field.name: number for field, number in zip(fields(SyncStats), numbers, strict=True)}
        )


class SyncMeter:
    """Collects the statistics of the syncs of one process."""

    def __init__(self, ranks_per_worker: int, clock: Clock = time.monotonic) -> None:
        """ranks_per_worker: Ranks over which a worker's seconds are averaged."""
        self._ranks = ranks_per_worker
        self._clock = clock
        self._stats: dict[int, SyncStats] = {}
        self._exposed_seconds = 0.0

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the seconds inside as time in which training stops."""
        began = self._clock()
        try:
            yield
        finally:
            self._exposed_seconds += self._clock() - began

    def take(self, worker_ids: Sequence[int]) -> list[SyncStats]:
        """Return this rank's part of each worker's statistics since the last call.

        The parts of a worker's ranks add up.
        """
        waited = SyncStats(exposed_seconds=self._exposed_seconds / self._ranks)
        taken = [self._stats.get(worker, SyncStats()) + waited for worker in worker_ids]
        self._stats, self._exposed_seconds = {}, 0.0
        return taken

    def add(self, worker_ids: Sequence[int], stats: SumStats) -> None:
        """Count a sum that has ended, to which these local workers contributed."""
        seconds = stats.transfer_seconds
        for index, worker in enumerate(worker_ids):
            num_bytes = stats.num_bytes / len(worker_ids)
            self._stats[worker] = self._stats.get(worker, SyncStats()) + SyncStats(
                wanted_sq=stats.wanted_sq[index],
                sent_sq=stats.sent_sq[index],
                error_sq=stats.error_sq[index],
                total_sq=stats.total_sq if index == 0 else 0.0,
                num_bytes=num_bytes,
                hidden_seconds=stats.hidden_seconds / self._ranks,
                transfer_seconds=seconds / self._ranks,
                peak_bytes_per_second=num_bytes / seconds if seconds else 0.0,
            )
