"""Reductions among workers, with one entry per local worker (DESIGN section 3, seam 1).

Local entries are added first; a placement over several ranks then reduces over its group, and callers cannot tell the difference.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.buckets import PerWorker, Scratch, Squares, fill_weighted_sum, kinds, parts
from adloco.distributed.comm.compressed import CompressedSum, Contributions, add_decoded
from adloco.distributed.dtensor import is_sharded, local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import Traffic, num_bytes, ring


class Sum(Protocol):
    """A weighted sum over workers, under way."""

    squares: Squares

    def transfer(self) -> None:
        """Return when everything has been exchanged. Called once, in any thread; training may go on meanwhile."""
        ...

    def result(self) -> list[Tensor]:
        """The sum, after `transfer`; the same bits on all islands."""
        ...


class Comm(Protocol):
    """Reductions among a fixed set of workers. Every worker of the set takes part in every call, in the same order.

    Results are views of memory that the next reduction writes to: copy what is to stay.
    """

    num_workers: int
    """Of the set, on all ranks."""

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        """Weighted sum of all workers' entries. weights: one per local worker; over the whole set they add up to 1."""
        ...

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Sum:
        """Weighted sum of origin - entry. What the workers bring has been read when this returns.

        overlapped: the sum keeps memory of its own, because other reductions may come before its end.
        """
        ...

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        """The tensors as worker `source` has them, for the workers that lack them; nothing is sent if there are none."""
        ...


class LocalComm:
    """All workers of the set live in one process (or on one island); elsewhere, where none takes part, the set is empty."""

    def __init__(
        self, num_workers: int, traffic: Traffic, scratch: Scratch | None = None, counts: Callable[[bool], bool] = lambda sharded: True
    ) -> None:
        """counts: whether this rank counts the bytes of sharded (or other) tensors; of several ranks that hold the same, one does."""
        self.num_workers = num_workers
        self.traffic = traffic
        self._scratch = scratch or Scratch()
        self._counts = counts

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        return self._sum(per_worker, weights, None, self._scratch).result()

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Sum:
        if given.wire is None or self.num_workers == 1:
            return self._sum(given.per_worker, given.weights, given.origin, Scratch() if overlapped else self._scratch)
        return CompressedSum(given, given.wire, self._counts, self._sum_of_blocks, lambda rows, count, sharded: rows)

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if receivers:
            self._count(tensors, self.num_workers - 1)
        return list(tensors)

    @torch.no_grad()
    def _sum(self, per_worker: PerWorker, weights: Sequence[float], origin: Sequence[Tensor] | None, scratch: Scratch) -> "Finished":
        assert len(per_worker) == len(weights) == self.num_workers, "one entry and one weight per worker"
        if not per_worker or not per_worker[0]:
            return Finished([], Squares.zero(len(weights)))
        self._count([tensor for entry in per_worker for tensor in entry], ring(self.num_workers))
        sums = list(per_worker[0])
        squares, total = torch.zeros(len(weights), dtype=torch.float64, device=local(sums[0]).device), 0.0
        for sharded, indices in kinds(sums):
            flat = scratch.flat(sums, indices)
            counted = origin is not None and self._counts(sharded)
            for index, part in parts(flat, sums, indices):
                entries = [local(entry[index]) for entry in per_worker]
                start = local(origin[index]).to(part.device) if origin else None
                fill_weighted_sum(part, entries, weights, start, squares if counted else None)
                sums[index] = with_local(part, like=sums[index])
            total += squared_norm([flat]) if counted else 0.0
        result = Squares.exact(squares)
        result.total = total
        return Finished(sums, result)

    def _sum_of_blocks(self, blocks: Tensor, wire: WireFormat, sharded: bool) -> tuple[Tensor, float]:
        if self._counts(sharded):
            self.traffic.add(blocks.numel(), crossings(wire, self.num_workers))
        total = add_decoded(blocks, wire)
        return (wire.decode(wire.encode(total)) if wire.sums_in_blocks else total), squared_norm([total]) if self._counts(sharded) else 0.0

    def _count(self, tensors: Sequence[Tensor], times: float) -> None:
        if self.num_workers > 1:
            self.traffic.add(num_bytes([tensor for tensor in tensors if self._counts(is_sharded(tensor))]), times)


class Finished:
    """A sum that needed no one else."""

    def __init__(self, sums: list[Tensor], squares: Squares) -> None:
        self.squares = squares
        self._sums = sums

    def transfer(self) -> None:
        return

    def result(self) -> list[Tensor]:
        return self._sums


def crossings(wire: WireFormat, workers: int) -> float:
    """How often each byte of a worker's blocks leaves it: as in a ring where sums are sent on in blocks, else once for every other worker."""
    return ring(workers) if wire.sums_in_blocks else workers - 1
