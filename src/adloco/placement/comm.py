"""Reductions among workers, with one entry per local worker (DESIGN section 3, seam 1).

`mean` adds the local entries first; a placement over several ranks then reduces over its group, and callers cannot tell the difference. Traffic
between workers is counted as if every worker stood on an island of its own, so that the figure is a property of the algorithm and not of the
placement; what the ranks of one island exchange is counted apart.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from adloco.placement.shards import is_sharded, local, with_local

BLOCK = 1 << 16
"""Elements that are worked on at once, so that what one operation writes is still in the cache for the next."""

PIECE = 1 << 20
"""Elements that are at least sent at once: fewer would cost more in calls than they save in waiting."""

PerWorker = Sequence[Sequence[Tensor]]
"""One sequence of tensors for each local worker, alike in shapes."""


class Traffic:
    """Payload bytes that this process has handed to collectives, in one direction."""

    def __init__(self) -> None:
        self.between = 0
        """To reductions with other workers: what would leave an island if each worker had one of its own."""
        self.inside = 0
        """To collectives among the ranks that serve one worker."""


class Comm(Protocol):
    """Reductions among a fixed set of workers. Every worker of the set takes part in every call, in the same order.

    Means are views of memory that the next reduction writes to: copy what is to stay.
    """

    def mean(self, per_worker: PerWorker, weights: Sequence[float], origin: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Weighted sum over all workers of the set, of their entries or with `origin` of origin - entry.

        weights: one per local worker; over the whole set they add up to 1.
        """
        ...

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        """The tensors as worker `source` has them, for the workers that lack them; nothing is sent if there are none."""
        ...


class Scratch:
    """Memory for reductions, kept from one to the next: fresh memory of the size of a model costs more time than filling it."""

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def flat(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
        """A one-dimensional tensor as large as this rank's shards of these tensors together, which are of one kind; another for each kind."""
        shards = [local(tensors[index]) for index in indices]
        size, like = sum(shard.numel() for shard in shards), shards[0]
        key = (is_sharded(tensors[indices[0]]), like.dtype, like.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[key][:size]


class LocalComm:
    """All workers of the set live in one process (or on one island); elsewhere, where none takes part, the set is empty."""

    def __init__(
        self, num_workers: int, traffic: Traffic, scratch: Scratch | None = None, counts: Callable[[Tensor], bool] = lambda tensor: True
    ) -> None:
        """counts: whether this rank counts the bytes of a tensor; of several ranks that hold the same, one does."""
        self.num_workers = num_workers
        self.traffic = traffic
        self._scratch = scratch or Scratch()
        self._counts = counts

    def mean(self, per_worker: PerWorker, weights: Sequence[float], origin: Sequence[Tensor] | None = None) -> list[Tensor]:
        assert len(per_worker) == len(weights) == self.num_workers, "one entry and one weight per worker"
        if not per_worker or not per_worker[0]:
            return []
        self._count([tensor for entry in per_worker for tensor in entry])
        sums = list(per_worker[0])
        for _, indices in kinds(sums):
            flat = self._scratch.flat(sums, indices)
            for index, part in parts(flat, sums, indices):
                fill_weighted_sum(part, [local(entry[index]) for entry in per_worker], weights, local(origin[index]) if origin else None)
                sums[index] = with_local(part, like=sums[index])
        return sums

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if receivers:
            self._count(tensors)
        return list(tensors)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        if self.num_workers > 1:
            self.traffic.between += num_bytes([tensor for tensor in tensors if self._counts(tensor)])


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Payload of these tensors as they are; of sharded ones, of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def kinds(tensors: Sequence[Tensor]) -> list[tuple[bool, list[int]]]:
    """(sharded, indices) of the tensors that may travel together: of one data type, on one device, and all sharded or none."""
    found: dict[tuple[bool, str, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault((is_sharded(tensor), str(tensor.dtype), str(tensor.device)), []).append(index)
    return [(kind[0], found[kind]) for kind in sorted(found)]


def parts(flat: Tensor, tensors: Sequence[Tensor], indices: Sequence[int]) -> list[tuple[int, Tensor]]:
    """(index, view) of each tensor's place in a flat one, in the shape of this rank's shard."""
    shards = [local(tensors[index]) for index in indices]
    views = torch.split(flat, [shard.numel() for shard in shards])
    return [(index, view.view_as(shard)) for index, view, shard in zip(indices, views, shards, strict=True)]


def filled_pieces(flat: Tensor, views: Sequence[tuple[int, Tensor]], fill: Callable[[int, Tensor], object]) -> Iterator[Tensor]:
    """Fills the views of a flat tensor one after another; yields it in consecutive pieces of PIECE elements or more as soon as they are filled."""
    begin = end = 0
    for index, view in views:
        fill(index, view)
        end += view.numel()
        if end - begin >= PIECE or begin < end == flat.numel():
            yield flat[begin:end]
            begin = end


@torch.no_grad()
def fill_weighted_sum(result: Tensor, entries: Sequence[Tensor], weights: Sequence[float], origin: Tensor | None) -> None:
    """Sum of the entries, or of origin - entry, each times its weight. Differences come first: they are small, and sums of parameters round."""
    columns = [torch.split(tensor.reshape(-1), BLOCK) for tensor in (result, *entries, *([] if origin is None else [origin]))]
    for block, *rest in zip(*columns, strict=True):
        terms = rest if origin is None else [torch.sub(rest[-1], entry) for entry in rest[:-1]]
        torch.mul(terms[0], weights[0], out=block)
        for term, weight in zip(terms[1:], weights[1:], strict=True):
            block.add_(term, alpha=weight)
