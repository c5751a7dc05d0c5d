"""The arithmetic of reductions: tensors side by side in a flat one, and weighted sums of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adloco.distributed.dtensor import is_sharded, local
from adloco.distributed.parallel.gradient_norms import squares

BLOCK = 1 << 16
"""Elements that are worked on at once, so that what one operation writes is still in the cache for the next."""

PIECE = 1 << 20
"""Elements that are at least sent at once: fewer would cost more in calls than they save in waiting."""

PerWorker = Sequence[Sequence[Tensor]]
"""One sequence of tensors for each local worker, alike in shapes."""


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


@dataclass
class Squares:
    """Squared norms of this rank's parts of what its workers send, each times its weight. Those of several sums add up."""

    wanted: list[float]
    """Of what each local worker would send without loss."""
    sent: list[float]
    """Of what it sent."""
    error: list[float]
    """Of the difference."""
    total: float = 0.0
    """Of the sum over all workers of what they sent: a part, which over the workers' ranks adds up to the whole."""

    @staticmethod
    def zero(workers: int) -> "Squares":
        """Of nothing sent."""
        return Squares([0.0] * workers, [0.0] * workers, [0.0] * workers)

    @staticmethod
    def exact(sent: Tensor) -> "Squares":
        """Of workers that send without loss. sent: (workers,)."""
        return Squares(sent.tolist(), sent.tolist(), [0.0] * len(sent))

    def add(self, other: "Squares") -> None:
        for mine, theirs in ((self.wanted, other.wanted), (self.sent, other.sent), (self.error, other.error)):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        self.total += other.total


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
def fill_weighted_sum(
    result: Tensor, entries: Sequence[Tensor], weights: Sequence[float], origin: Tensor | None, total: Tensor | None = None
) -> None:
    """Sum of the entries, or of origin - entry, each times its weight. Differences come first: they are small, and sums of parameters round.

    total: takes up the squared norm of each term, in float64, shape (entries,).
    """
    columns = [torch.split(tensor.reshape(-1), BLOCK) for tensor in (result, *entries, *([] if origin is None else [origin]))]
    for block, *rest in zip(*columns, strict=True):
        terms = rest if origin is None else [torch.sub(rest[-1], entry) for entry in rest[:-1]]
        if total is not None:
            total += torch.stack([squares(term) * weight**2 for term, weight in zip(terms, weights, strict=True)])
        torch.mul(terms[0], weights[0], out=block)
        for term, weight in zip(terms[1:], weights[1:], strict=True):
            block.add_(term, alpha=weight)
