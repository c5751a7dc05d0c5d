"""Pseudo-gradients in a wire format: what each worker sends, and what it keeps back as the residual of error feedback.

Each tensor is cut into blocks of its own (of sharded ones, each rank's shard), so that the bytes of a tensor do not depend on its neighbours, on the
fragment it belongs to, nor on the placement as long as shards are whole blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.buckets import PIECE, PerWorker, Squares, kinds
from adloco.distributed.dtensor import local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm

BlockSum = Callable[[Tensor, WireFormat, bool], tuple[Tensor, float]]
"""(blocks, wire, sharded) -> this rank's slice of the sum over all workers, decoded, and its part of the squared norm that it had before.

blocks: of each local worker, (workers, rows, block_bytes) uint8. sharded: whether they are of sharded tensors. The sum: (rows, block).
"""

Join = Callable[[Tensor, int, bool], Tensor]
"""(slice, rows, sharded) -> all rows, from the slices of the ranks of an island that hold the same."""


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """What the local workers bring to a sum of pseudo-gradients."""

    per_worker: PerWorker
    """Their parameters."""
    weights: Sequence[float]
    """One for each; over all workers of the sum they add up to 1."""
    origin: Sequence[Tensor]
    """What is subtracted from: the global parameters. May be in host memory."""
    wire: WireFormat | None = None
    """None: the differences as they are."""
    residuals: PerWorker = ()
    """With error feedback: what each has not sent so far; changed in place. A step ahead it is in their parameters, and not added here."""


def keeps_residuals(wire: WireFormat | None) -> bool:
    """Whether workers keep what a sync leaves unsent."""
    return wire is not None and wire.error_feedback > 0


def feedback(wire: WireFormat | None) -> Literal["none", "behind", "ahead"]:
    """What becomes of what a sync leaves unsent: it is lost, waits in memory, or stays in the worker's parameters."""
    if wire is None or not keeps_residuals(wire):
        return "none"
    return "ahead" if wire.step_ahead else "behind"


class CompressedSum:
    """The weighted sum over workers of origin - entry, exchanged in a wire format."""

    @torch.no_grad()
    def __init__(self, given: Contributions, wire: WireFormat, counts: Callable[[bool], bool], sum_up: BlockSum, join: Join) -> None:
        """counts: whether this rank is the one, of those that hold the same sharded (or other) tensors, that counts them in `squares`."""
        self._like, self._wire, self._sum_up, self._join = given.per_worker[0], wire, sum_up, join
        self._kinds = kinds(self._like)
        self.squares = Squares.zero(len(given.weights))
        self._blocks = [self._encoded(given, indices, counts(sharded)) for sharded, indices in self._kinds]
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def transfer(self) -> None:
        for (sharded, _), blocks in zip(self._kinds, self._blocks, strict=True):
            values, total = self._sum_up(blocks, self._wire, sharded)
            self.squares.total += total
            self._sums.append(values)

    def result(self) -> list[Tensor]:
        self._blocks = []  # Not before: on a GPU another stream may still read them.
        results = list(self._like)
        for (sharded, indices), values in zip(self._kinds, self._sums, strict=True):
            rows = sum(map(self._rows, indices))
            for index, place in self._places(self._join(values, rows, sharded), indices):
                results[index] = with_local(place.to(self._like[index].dtype), like=self._like[index])
        return results

    def _encoded(self, given: Contributions, indices: Sequence[int], counted: bool) -> Tensor:
        """(workers, rows, block_bytes) of these tensors; the residuals become what is left."""
        first = local(self._like[indices[0]])
        values = torch.zeros(sum(map(self._rows, indices)), self._wire.block, dtype=torch.float32, device=first.device)  # Padding stays zero.
        encoded = torch.empty(len(given.weights), len(values), self._wire.block_bytes, dtype=torch.uint8, device=first.device)
        places = self._places(values, indices)
        for worker, (entry, weight) in enumerate(zip(given.per_worker, given.weights, strict=True)):
            for index, place in places:
                place.copy_(local(given.origin[index]).to(first.device) - local(entry[index]))
                if given.residuals and not self._wire.step_ahead:
                    place.add_(local(given.residuals[worker][index]).to(first.device))
            for rows in in_pieces(len(values), self._wire):
                wanted = values[rows] * weight
                encoded[worker, rows] = self._wire.encode(wanted)
                sent = self._wire.decode(encoded[worker, rows])
                if counted:
                    self._count(worker, wanted, sent)
                if given.residuals and weight:  # A worker without weight has sent nothing, and keeps all.
                    values[rows] -= sent / weight
            if given.residuals:
                for index, place in places:
                    local(given.residuals[worker][index]).copy_(place * self._wire.error_feedback)
        return encoded

    def _count(self, worker: int, wanted: Tensor, sent: Tensor) -> None:
        for squares, tensor in ((self.squares.wanted, wanted), (self.squares.sent, sent), (self.squares.error, wanted - sent)):
            squares[worker] += squared_norm([tensor])

    def _rows(self, index: int) -> int:
        return -(-local(self._like[index]).numel() // self._wire.block)

    def _places(self, values: Tensor, indices: Sequence[int]) -> list[tuple[int, Tensor]]:
        """(index, view) of each tensor in rows of blocks, in the shape of this rank's shard."""
        rows = torch.split(values, [self._rows(index) for index in indices])
        shards = [local(self._like[index]) for index in indices]
        return [(index, part.reshape(-1)[: shard.numel()].view_as(shard)) for index, part, shard in zip(indices, rows, shards, strict=True)]


def add_decoded(blocks: Tensor, wire: WireFormat) -> Tensor:
    """Sum of workers' blocks, (workers, rows, block_bytes), as float32 (rows, block), in the order of the workers: the same on every placement."""
    total = torch.zeros(blocks.shape[1], wire.block, dtype=torch.float32, device=blocks.device)
    for rows in in_pieces(len(total), wire):
        for one in blocks:
            total[rows] += wire.decode(one[rows])
    return total


def in_pieces(rows: int, wire: WireFormat) -> Iterator[slice]:
    """Rows of blocks, about a million values at once, so that what one operation of a format writes is still in the cache for the next."""
    size = max(1, PIECE // wire.block)
    return (slice(begin, begin + size) for begin in range(0, rows, size))
