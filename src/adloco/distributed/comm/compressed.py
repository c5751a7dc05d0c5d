"""Pseudo-gradients and means in a wire format: what workers send, and what they keep as residuals.

Each tensor (each rank's shard, if it is sharded) is cut into blocks of its own. So the bytes of a
tensor depend neither on its neighbours nor on its fragment. They do not depend on the placement
either, as long as shards are whole blocks.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from adloco.distributed.codecs.codec import WireFormat, feedback, sums_again
from adloco.distributed.comm.buckets import bucket_indices, sum_dtype
from adloco.distributed.comm.comm import Contributions, SumStats, rounded_origin
from adloco.distributed.dtensor import local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import ring

PIECE = 1 << 18
"""Values that a format handles at once on a CPU: what one operation writes is still in the cache
for the next.
"""
PIECE_ON_GPU = 1 << 24
"""Values that a format handles at once on a GPU, where each operation costs a kernel launch. On an
H100, 305M values take 13 ms in int4 in pieces of this size, 38 ms in pieces of a quarter of it, and
207 ms in pieces of a sixteenth (reproduce/LOG.md, 2026-11-23).
"""

BlockSum = Callable[[Tensor, WireFormat, bool, SumStats], Tensor]
"""(blocks, codec, sharded, stats) -> this rank's slice of the sum over all workers, decoded.

blocks: uint8 of shape (local workers, rows, block_bytes). sharded: True if they come from sharded
tensors. stats: The function adds bytes and the squared norm of the sum to it. The result is float32
of shape (rows, block).
"""

Join = Callable[[Tensor, int, bool], Tensor]
"""(slice, rows, sharded) -> all rows, gathered from an island's ranks with the same tensors."""


class CompressedSum:
    """A weighted sum over workers that is exchanged in a wire format: of origin - entry, or of the
    entries if there is no origin.
    """

    @torch.no_grad()
    def __init__(
        self,
        given: Contributions,
        codec: WireFormat,
        counts: Callable[[bool], bool],
        sum_up: BlockSum,
        join: Join,
    ) -> None:
        """
        Args:
            given: What the local workers contribute.
            codec: The wire format.
            counts: Given True for sharded and False for other tensors, says whether this rank
                counts their norms. One of the ranks that have the same tensors does.
            sum_up: Exchanges blocks and adds them up.
            join: Gathers the slices of a sum.
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
        self._blocks = []  # Not earlier, because on a GPU another stream may still read them.
        results = list(self._like)
        for (sharded, indices), values in zip(self._buckets, self._sums, strict=True):
            rows = sum(map(self._rows, indices))
            for index, place in self._places(self._join(values, rows, sharded), indices):
                dtype = sum_dtype(self._like[index].dtype)
                results[index] = with_local(place.to(dtype), like=self._like[index])
        return results

    def _encoded(self, given: Contributions, indices: Sequence[int], counted: bool) -> Tensor:
        """Encode these tensors of all local workers, and set their residuals to what is left, or
        to their estimates.

        Returns uint8 of shape (workers, rows, block_bytes).
        """
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
        kept = feedback(self._codec) if given.residuals else "none"
        estimates = torch.zeros_like(values) if kept == "ef21" else values
        remembered = self._places(estimates, indices)
        for worker, (entry, weight) in enumerate(zip(given.per_worker, given.weights, strict=True)):
            for index, place in places:
                worker_params = local(entry[index])
                exact = sum_dtype(worker_params.dtype)
                if given.origin:
                    start = rounded_origin(local(given.origin[index]), worker_params)
                    place.copy_(start.to(exact) - worker_params.to(exact))
                else:
                    place.copy_(worker_params)
                if kept == "in memory":
                    place.add_(local(given.residuals[worker][index]).to(first.device))
            if kept == "ef21":
                for index, place in remembered:
                    place.copy_(local(given.residuals[worker][index]))
            for rows in in_pieces(values, self._codec):
                whole = values[rows] * weight
                wanted = whole - estimates[rows] if kept == "ef21" else whole
                encoded[worker, rows] = self._codec.encode(wanted)
                sent = self._codec.decode(encoded[worker, rows])
                if counted:
                    self._count(worker, whole, sent, wanted - sent)
                if kept == "ef21":
                    estimates[rows] += sent
                # A worker with weight 0 sends nothing and keeps everything.
                elif given.residuals and weight:
                    values[rows] -= sent / weight
            if given.residuals:
                for index, place in remembered:
                    local(given.residuals[worker][index]).copy_(place * self._codec.error_feedback)
        return encoded

    def _count(self, worker: int, wanted: Tensor, sent: Tensor, error: Tensor) -> None:
        stats = self.stats
        terms = ((stats.wanted_sq, wanted), (stats.sent_sq, sent), (stats.error_sq, error))
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
    """Add up workers' blocks in the order of the workers, which is the same on every placement.

    Args:
        blocks: uint8 of shape (workers, rows, block_bytes).
        codec: The wire format.

    Returns:
        The sum, float32 of shape (rows, block).
    """
    total = torch.zeros(blocks.shape[1], codec.block, dtype=torch.float32, device=blocks.device)
    for rows in in_pieces(total, codec):
        for one in blocks:
            total[rows] += codec.decode(one[rows])
    return total


def in_pieces(values: Tensor, codec: WireFormat) -> Iterator[slice]:
    """Cut rows of blocks into slices that a format handles at once; see `PIECE`."""
    size = PIECE if values.device.type == "cpu" else PIECE_ON_GPU
    step = max(1, size // codec.block)
    return (slice(begin, begin + step) for begin in range(0, len(values), step))


def crossings(codec: WireFormat, workers: int) -> float:
    """How often each byte of a worker's blocks leaves the worker.

    As often as in a ring if sums are encoded again, else once for every other worker.
    """
    return ring(workers) if sums_again(codec) else workers - 1
