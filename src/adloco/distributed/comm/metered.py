"""Costs and losses of the syncs of a round, measured by a wrapper around the communicator.

The algorithm calls the wrapper like any communicator, and the wrapper records bytes, seconds and
squared norms.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from torch import Tensor

from adloco.distributed.comm.buckets import PerWorker
from adloco.distributed.comm.comm import Comm, Contributions, SumStats, Work
from adloco.distributed.wire.wire_format import WireFormat

Clock = Callable[[], float]
"""() -> seconds since some fixed moment."""


@dataclass(frozen=True, kw_only=True)
class SyncStats:
    """What the syncs of a round cost one worker; statistics of several syncs add up.

    Squared norms are taken after multiplication by the worker's weight.
    """

    wanted_sq: float = 0.0
    """Squared norm of its pseudo-gradients before encoding."""
    sent_sq: float = 0.0
    """Squared norm of what it sent."""
    error_sq: float = 0.0
    """Squared norm of the difference of the two."""
    total_sq: float = 0.0
    """Its part of the squared norm of the sum over its trainer's workers.

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

    def around(self, comm: Comm, worker_ids: Sequence[int]) -> Comm:
        """Wrap a communicator so that its sums are measured.

        worker_ids: The local workers whose entries it is given.
        """
        return _MeteredComm(comm, worker_ids, self, self._clock)

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

    def add(
        self,
        worker_ids: Sequence[int],
        stats: SumStats,
        transfer_seconds: float,
        hidden_seconds: float,
    ) -> None:
        """Count one sum."""
        for index, worker in enumerate(worker_ids):
            num_bytes = stats.num_bytes / len(worker_ids)
            self._stats[worker] = self._stats.get(worker, SyncStats()) + SyncStats(
                wanted_sq=stats.wanted_sq[index],
                sent_sq=stats.sent_sq[index],
                error_sq=stats.error_sq[index],
                total_sq=stats.total_sq if index == 0 else 0.0,
                num_bytes=num_bytes,
                hidden_seconds=hidden_seconds / self._ranks,
                transfer_seconds=transfer_seconds / self._ranks,
                peak_bytes_per_second=num_bytes / transfer_seconds if transfer_seconds else 0.0,
            )


class _MeteredComm:
    def __init__(
        self, comm: Comm, worker_ids: Sequence[int], meter: SyncMeter, clock: Clock
    ) -> None:
        self.num_workers = comm.num_workers
        self._comm = comm
        self._worker_ids = worker_ids
        self._meter = meter
        self._clock = clock

    def mean(
        self, per_worker: PerWorker, weights: Sequence[float], wire: WireFormat | None = None
    ) -> list[Tensor]:
        return self._comm.mean(per_worker, weights, wire)

    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        return self._comm.broadcast(tensors, source, receivers)

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        began = self._clock()
        work = self._comm.pseudo_gradient(given, overlapped=overlapped)
        return _MeteredWork(
            work, self._worker_ids, self._meter, self._clock, filled_seconds=self._clock() - began
        )


class _MeteredWork:
    def __init__(
        self,
        work: Work,
        worker_ids: Sequence[int],
        meter: SyncMeter,
        clock: Clock,
        filled_seconds: float,
    ) -> None:
        self.stats = work.stats
        self.background_seconds = 0.0
        self._work = work
        self._worker_ids = worker_ids
        self._meter = meter
        self._clock = clock
        self._filled_seconds = filled_seconds

    def wait(self) -> list[Tensor]:
        began = self._clock()
        result = self._work.wait()
        waited = self._clock() - began
        self.background_seconds = self._work.background_seconds
        hidden = max(0.0, self.background_seconds - waited)
        transfer = self.background_seconds or self._filled_seconds + waited
        self._meter.add(self._worker_ids, self.stats, transfer, hidden)
        return result
