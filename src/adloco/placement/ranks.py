"""The placement of a run over several processes (ranks) of torch.distributed: each hosts a contiguous, balanced share of the workers.

Process groups are made here alone: `comm` is called on all ranks, in the same order, also by those that host none of its workers, and keeps one group
for each set of ranks. Workers of one rank run in threads and are added up before anything crosses the network.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.placement.comm import Comm, LocalComm, Traffic, num_bytes, weighted_sum
from adloco.placement.process import Item, OneProcess, Result

TIMEOUT = timedelta(minutes=30)
"""Longest wait for the others: a rank with a large batch can be minutes behind at a sync."""


class Ranks:
    """Workers over the ranks of the default process group."""

    def __init__(self, num_workers: int, device: torch.device, threads: int) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_workers = num_workers
        self.device = device
        self.traffic = Traffic()
        self._process = OneProcess(device, threads)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # The same intra-operator threads on every rank, however many workers it hosts: the numbers must not depend on the placement.
        torch.set_num_threads(1)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def owner(self, worker: int) -> int:
        """Rank that hosts the worker."""
        return worker * self.num_ranks // self.num_workers

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        return [worker for worker in worker_ids if self.owner(worker) == self.rank]

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        ranks = tuple(sorted({self.owner(worker) for worker in worker_ids}))
        if len(ranks) == 1:
            return LocalComm(len(self.local(worker_ids)), self.traffic)
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)
        return GroupComm(self._groups[ranks], self.owner, self.rank in ranks, self.traffic)

    def gather(self, rows: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, {worker: list(row) for worker, row in rows.items()})
        merged = {worker: row for part in everyone for worker, row in part.items()}
        if len(merged) > 1:
            self.traffic.add(sum(8 * len(row) for row in rows.values()))
        return {worker: merged[worker] for worker in sorted(merged)}

    def any(self, flag: bool) -> bool:
        return max(self._numbers(float(flag))) > 0

    def bytes_handed(self) -> int:
        return round(sum(self._numbers(float(self.traffic.bytes))))

    def collect(self, items: Sequence[Item]) -> list[Item]:
        everyone: list[Any] | None = [None] * self.num_ranks if self.first else None
        dist.gather_object(list(items), everyone)
        return [item for part in everyone for item in part] if everyone is not None else list(items)

    def agree(self, value: Item) -> Item:
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], on_failure: Callable[[], None]) -> list[Result]:
        return self._process.map(function, items, on_failure)

    def _numbers(self, mine: float) -> list[float]:
        """One float64 of every rank."""
        row = torch.zeros(self.num_ranks, dtype=torch.float64, device=self.device)
        row[self.rank] = mine
        dist.all_reduce(row)
        return [float(number) for number in row]


class GroupComm:
    """Workers of the set live on several ranks."""

    def __init__(self, group: dist.ProcessGroup, owner: Callable[[int], int], member: bool, traffic: Traffic) -> None:
        self._group = group
        self._owner = owner
        self._member = member
        self._traffic = traffic

    def mean(self, per_worker: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
        if not self._member or not per_worker[0]:
            return []
        self._traffic.add(sum(num_bytes(entry) for entry in per_worker))
        total = torch.tensor([float(sum(weights))], dtype=torch.float64, device=per_worker[0][0].device)
        dist.all_reduce(total, group=self._group)
        fractions = [weight / float(total) for weight in weights]
        sums = [weighted_sum(entries, fractions) for entries in zip(*per_worker, strict=True)]
        self._in_one(sums, lambda flat: dist.all_reduce(flat, group=self._group))
        return sums

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if not self._member or not receivers or not tensors:
            return list(tensors)
        rank = self._owner(source)
        if dist.get_rank() == rank:
            self._traffic.add(num_bytes(tensors))
        copies = [tensor.detach().clone() for tensor in tensors]
        self._in_one(copies, lambda flat: dist.broadcast(flat, rank, group=self._group))
        return copies

    @torch.no_grad()
    def _in_one(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any]) -> None:
        """The collective over all these tensors at once, in place; one call for each data type."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            collective(flat)
            for tensor, part in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
