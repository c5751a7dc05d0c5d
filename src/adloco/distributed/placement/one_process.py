"""The placement of a run in one process: every worker is here, and co-located workers run in
threads, one per core.

On CPUs, threads beat processes, vmap and stacking for models of about a million parameters (1.9x
over one after another on two cores), because torch releases the interpreter lock inside its
operators. Several workers compute with one intra-operator thread each, however many of them run at
once, so the numbers do not depend on `threads`; a single worker has all cores to itself.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import torch
from torch import nn

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import BufferPool
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.local import LocalComm
from adloco.distributed.parallel.island import Engine, SingleDevice
from adloco.distributed.parallel.layers import Fill
from adloco.distributed.traffic import Bytes, Traffic

Item = TypeVar("Item")
Result = TypeVar("Result")


class Placement(Protocol):
    """Which workers are here, how they run, and how they reach the others."""

    device: torch.device
    num_ranks: int
    """Processes among which the workers are spread."""
    ranks_per_worker: int
    """Ranks that serve a worker together."""
    shards: int
    """Ranks over which a worker's parameters are spread."""
    traffic: Traffic
    """What this process has handed to collectives."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the one that writes and shows."""
        ...

    def bytes_handed(self) -> Bytes:
        """Of all ranks, so far."""
        ...

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        """The model as the ranks that serve a worker run it, on the device, filled if it has no
        memory yet.

        Called for each local worker, in rising order; may shard the model in place.

        """
        ...

    def broadcast_model(self, model: nn.Module) -> None:
        """Set the model's parameters and buffers to those of the first process. Before training
        starts, not counted as traffic.
        """
        ...

    def whole(self, state: Item) -> Item:
        """A state with its sharded tensors gathered; over several ranks, on the CPU. Called on all
        ranks of an island, in the same order.
        """
        ...

    def collect(self, items: Sequence[Item]) -> list[Item]:
        """The items of all processes in the first one; elsewhere those of this process. For
        records, not counted as traffic.
        """
        ...

    def agree(self, value: Item) -> Item:
        """The first process's value."""
        ...

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        """Those of the workers that live in this process."""
        ...

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        """Reductions among these workers. Called in every process in the same order, also where
        none of them lives.
        """
        ...

    def gather(self, rows: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """A few float64 scalars of every worker, by worker id in rising order, from those of the
        workers here.

        Gathered, not summed, so that every rank adds them in the same order and takes the same
        decisions to the last bit.
        """
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        ...

    def largest(self, number: float) -> float:
        """The largest of all processes' numbers."""
        ...

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_failure: Callable[[], None],
    ) -> list[Result]:
        """The function on each item, concurrently where that helps.

        on_failure: called as soon as one item fails or the wait is interrupted, to end the others
        early; the error is raised once all have ended.
        """
        ...


class OneProcess:
    """All workers in this process, up to `threads` of them at once; 0 means one per core on a CPU,
    one after another on a GPU.
    """

    def __init__(self, device: str | torch.device = "cpu", threads: int = 0) -> None:
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._pool = BufferPool()
        self._transfers = Transfers(self.device)
        self.num_ranks = self.ranks_per_worker = self.shards = 1
        self.threads = threads or (num_cores() if self.device.type == "cpu" else 1)
        _set_up_matrix_products()

    @property
    def is_rank_zero(self) -> bool:
        return True

    def bytes_handed(self) -> Bytes:
        return self.traffic.total()

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        return SingleDevice(model, self.device, compile, fill)

    def broadcast_model(self, model: nn.Module) -> None:
        return

    def whole(self, state: Item) -> Item:
        return state

    def collect(self, items: Sequence[Item]) -> list[Item]:
        return list(items)

    def agree(self, value: Item) -> Item:
        return value

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        return list(worker_ids)

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        return LocalComm(len(worker_ids), self.traffic, transfers=self._transfers, pool=self._pool)

    def gather(self, rows: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        if len(rows) > 1:
            self.traffic.add(sum(8 * len(row) for row in rows.values()), len(rows) - 1)
        return {worker: list(rows[worker]) for worker in sorted(rows)}

    def any(self, flag: bool) -> bool:
        return flag

    def largest(self, number: float) -> float:
        return number

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_failure: Callable[[], None],
    ) -> list[Result]:
        if len(items) == 1:
            return [function(items[0])]
        # Two intra-operator threads in each of two busy workers run 70x slower than one (measured):
        # one each.
        with ThreadPoolExecutor(self.threads, initializer=self._set_up_thread) as pool:
            try:
                futures = [pool.submit(function, item) for item in items]
                _wait(futures, on_failure)
            except BaseException:  # Ctrl+C: the threads must not train on behind the caller's back.
                on_failure()
                raise
        return [future.result() for future in futures]

    def _set_up_thread(self) -> None:
        torch.set_num_threads(1)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # The current device is a thread's own.


def _wait(futures: Sequence[Future[Result]], on_failure: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        # Waking now and then: a signal that the system hands to another thread is seen by the main
        # thread only when it runs.
        ended, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in ended):
            on_failure()


def _set_up_matrix_products() -> None:
    """Make the process's first matrix products here, where nothing else runs.

    The library behind them sets itself up on its first calls. When two threads made these at once,
    1 start of 495 had a gradient that differed in rounding, and with it the whole run; with this,
    none of 726 (reproduce/LOG.md, 2026-11-21).
    """
    square = torch.ones(256, 256)
    for left, right in ((square, square), (square.T, square), (square, square.T)):
        torch.mm(left, right)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
