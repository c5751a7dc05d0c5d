"""The placement of a run in one process, where workers run in threads, one per core.

On CPUs, threads beat processes, vmap and stacking for models of about a million parameters (1.9x
the speed of running workers one after another, on two cores), because torch releases the
interpreter lock inside its operators. Several workers compute with one intra-operator thread each,
however many of them run at once, so the numbers do not depend on `threads`. A single worker uses
all cores.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import BufferPool
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.islands import Islands
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.layers import Fill
from adloco.distributed.parallel.single import SingleDevice
from adloco.distributed.placement.placement import Item, Result
from adloco.distributed.traffic import Bytes, Traffic


class OneProcess:
    """All workers in this process."""

    def __init__(self, device: str | torch.device = "cpu", threads: int = 0) -> None:
        """
        Args:
            device: Where the workers compute.
            threads: Workers that run at once. 0: one per core on a CPU, one at a time on a GPU.
        """
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._pool = BufferPool()
        self._transfers = Transfers(self.device)
        self.num_ranks = self.ranks_per_worker = self.shards = 1
        self.threads = threads or (num_cores() if self.device.type == "cpu" else 1)
        _set_up_matrix_products()

    @property
    def rank(self) -> int:
        return 0

    @property
    def is_island_first(self) -> bool:
        return True

    @property
    def is_rank_zero(self) -> bool:
        return True

    def total_bytes(self) -> Bytes:
        return self.traffic.total()

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        return SingleDevice(model, self.device, compile, fill)

    def broadcast_model(self, model: nn.Module) -> None:
        return

    def gather_shards(self, state: Item, *, keep: bool = True) -> Item:
        gathered: Item = gather_shards(state, keep=keep)
        return gathered

    def all_values(self, value: Item) -> list[Item]:
        return [value]

    def transfer(self, state: Item | None, sender: int, receiver: int) -> Item | None:
        return state

    def collect(self, items: Sequence[Item]) -> list[Item]:
        return list(items)

    def agree(self, value: Item) -> Item:
        return value

    def owner(self, worker: int) -> int:
        return 0

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        return list(worker_ids)

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        islands = Islands(workers=[len(worker_ids)], traffic=self.traffic)
        return Comm(islands, transfers=self._transfers, pool=self._pool)

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
        # One intra-operator thread per worker: two busy workers with two each ran 70x slower.
        with ThreadPoolExecutor(self.threads, initializer=self._set_up_thread) as pool:
            try:
                futures = [pool.submit(function, item) for item in items]
                _wait(futures, on_failure)
            except BaseException:  # After Ctrl+C the threads must not train on.
                on_failure()
                raise
        return [future.result() for future in futures]

    def _set_up_thread(self) -> None:
        torch.set_num_threads(1)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Each thread has its own current device.


def _wait(futures: Sequence[Future[Result]], on_failure: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        # The timeout lets the main thread run now and then: Python handles signals only there.
        ended, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in ended):
            on_failure()


def _set_up_matrix_products() -> None:
    """Make the process's first matrix products here, where nothing else runs.

    The library behind them sets itself up on its first calls. When two threads made these at once,
    the first gradient differed in rounding in 1 of 495 runs, and so did the rest of that run. With
    this function it was 0 of 726 (reproduce/LOG.md, 2026-11-21).
    """
    square = torch.ones(256, 256)
    for left, right in ((square, square), (square.T, square), (square, square.T)):
        torch.mm(left, right)


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
