"""Pseudo-gradients in a wire format: what each worker sends, and what it keeps back as the residual
of error feedback.

Each tensor is cut into blocks of its own (of sharded ones, each rank's shard), so that the bytes of
a tensor do not depend on its neighbours, on the fragment it belongs to, nor on the placement as
long as shards are whole blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.buckets import PIECE, bucket_indices, sum_dtype
from adloco.distributed.comm.comm import Contributions, SumStats, rounded_origin
from adloco.distributed.dtensor import local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import ring

BlockSum = Callable[[Tensor, WireFormat, bool, SumStats], Tensor]
"""(blocks, codec, sharded, stats) -> this rank's slice of the sum over all workers, decoded.

blocks: Of each local worker, (workers, rows, block_bytes) uint8. sharded: Whether they are of
sharded tensors. stats: Bytes and the squared norm of the sum are added to it. The sum:
(rows, block) float32.
"""

Join = Callable[[Tensor, int, bool], Tensor]
"""(slice, rows, sharded) -> all rows, from the slices of the ranks of an island that hold the same.
"""


def keeps_residuals(codec: WireFormat | None) -> bool:
    """Whether workers keep what a sync leaves unsent."""
    return codec is not None and codec.error_feedback > 0


def feedback(codec: WireFormat | None) -> Literal["none", "behind", "ahead"]:
    """What becomes of what a sync leaves unsent: it is lost, waits in memory, or stays in the
    worker's parameters.
    """
    if codec is None or not keeps_residuals(codec):
        return "none"
    return "ahead" if codec.step_ahead else "behind"


class CompressedSum:
    """The weighted sum over workers of origin - entry, exchanged in a wire format."""

    @torch.no_grad()
    def __init__(
        self,
        given: Contributions,
        codec: WireFormat,
        counts: Callable[[bool], bool],
        sum_up: BlockSum,
        join: Join,
    ) -> None:
        """counts: Whether this rank, of those that hold the same sharded (True) or other tensors,
        is the one that counts their norms.
        """
        self._like, self._codec, self._sum_up, self._join = given.per_worker[0], codec, sum_up, join
        self._buckets = bucket_indices(self._like)
        self.stats = SumStats.zero(len(given.weights))
        self._blocks = [
            self._encoded(given, indices, counts(sharded)) for sharded, indices in self._buckets
        ]
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def transfer(self) -> None:
        for (sharded, _), blocks in zip(self._buckets, self._blocks, strict=True):
            self._sums.append(self._sum_up(blocks, self._codec, sharded, self.stats))

    def result(self) -> list[Tensor]:
        self._blocks = []  # Not before: on a GPU another stream may still read them.
        results = list(self._like)
        for (sharded, indices), values in zip(self._buckets, self._sums, strict=True):
            rows = sum(map(self._rows, indices))
            for index, place in self._places(self._join(values, rows, sharded), indices):
                dtype = sum_dtype(self._like[index].dtype)
                results[index] = with_local(place.to(dtype), like=self._like[index])
        return results

    def _encoded(self, given: Contributions, indices: Sequence[int], counted: bool) -> Tensor:
        """(workers, rows, block_bytes) of these tensors; the residuals become what is left."""
        first = local(self._like[indices[0]])
        values = torch.zeros(
            sum(map(self._rows, indices)),
            self._codec.block,
            dtype=torch.float32,
            device=first.device,
        )  # Padding stays zero.
        encoded = torch.empty(
            len(given.weights),
            len(values),
            self._codec.block_bytes,
            dtype=torch.uint8,
            device=first.device,
        )
        places = self._places(values, indices)
        for worker, (entry, weight) in enumerate(zip(given.per_worker, given.weights, strict=True)):
            for index, place in places:
                worker_params = local(entry[index])
                exact = sum_dtype(worker_params.dtype)
                start = rounded_origin(local(given.origin[index]), worker_params)
                place.copy_(start.to(exact) - worker_params.to(exact))
                if given.residuals and not self._codec.step_ahead:
                    place.add_(local(given.residuals[worker][index]).to(first.device))
            for rows in in_pieces(len(values), self._codec):
                wanted = values[rows] * weight
                encoded[worker, rows] = self._codec.encode(wanted)
                sent = self._codec.decode(encoded[worker, rows])
                if counted:
                    self._count(worker, wanted, sent)
                if (
                    given.residuals and weight
                ):  # A worker without weight has sent nothing, and keeps all.
                    values[rows] -= sent / weight
            if given.residuals:
                for index, place in places:
                    local(given.residuals[worker][index]).copy_(place * self._codec.error_feedback)
        return encoded

    def _count(self, worker: int, wanted: Tensor, sent: Tensor) -> None:
        stats = self.stats
        terms = ((stats.wanted_sq, wanted), (stats.sent_sq, sent), (stats.error_sq, wanted - sent))
        for norms_sq, tensor in terms:
            norms_sq[worker] += squared_norm([tensor])

    def _rows(self, index: int) -> int:
        return -(-local(self._like[index]).numel() // self._codec.block)

    def _places(self, values: Tensor, indices: Sequence[int]) -> list[tuple[int, Tensor]]:
        """(index, view) of each tensor in rows of blocks, in the shape of this rank's shard."""
        rows = torch.split(values, [self._rows(index) for index in indices])
        shards = [local(self._like[index]) for index in indices]
        return [
            (index, part.reshape(-1)[: shard.numel()].view_as(shard))
            for index, part, shard in zip(indices, rows, shards, strict=True)
        ]


def add_decoded(blocks: Tensor, codec: WireFormat) -> Tensor:
    """Sum of workers' blocks, (workers, rows, block_bytes), as float32 (rows, block), in the order
    of the workers: the same on every placement.
    """
    total = torch.zeros(blocks.shape[1], codec.block, dtype=torch.float32, device=blocks.device)
    for rows in in_pieces(len(total), codec):
        for one in blocks:
            total[rows] += codec.decode(one[rows])
    return total


def in_pieces(rows: int, codec: WireFormat) -> Iterator[slice]:
    """Rows of blocks, about a million values at once, so that what one operation of a format writes
    is still in the cache for the next.
    """
    size = max(1, PIECE // codec.block)
    return (slice(begin, begin + size) for begin in range(0, rows, size))


def crossings(codec: WireFormat, workers: int) -> float:
    """How often each byte of a worker's blocks leaves it: as in a ring where sums are sent on in
    blocks, else once for every other worker.
    """
    return ring(workers) if codec.sums_in_blocks else workers - 1
