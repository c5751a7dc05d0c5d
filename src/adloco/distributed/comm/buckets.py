"""The arithmetic of sums over workers: what they contribute, flat buckets of it, weighted sums.

Half-precision tensors are added up in float32, because a mean of small differences would be lost to
rounding in bf16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adloco.distributed.dtensor import converted, is_sharded, local
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.wire_format import WireFormat

BLOCK = 1 << 17
"""Elements that one operation handles on a CPU; the next one then finds them in the cache."""

BLOCK_ON_GPU = 1 << 22
"""Elements that one operation handles on a GPU, where each costs a launch.

A sync of four workers with 305M parameters takes 0.1 s on an H100. With the blocks of a CPU it took
1.2 s, and nearly all of it was launches.
"""

TOGETHER = 1 << 24
"""Elements of small tensors that one operation handles together on a GPU, where a launch for each
would take longer than its arithmetic.
"""

PIECE = 1 << 20
"""Fewest elements that one collective sends; with less, calls cost more than overlap saves."""

PerWorker = Sequence[Sequence[Tensor]]
"""One sequence of tensors for each local worker, with the same shapes."""


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Contributions of the local workers to a weighted sum: parameters, of which differences from
    the global ones are sent, or other tensors.
    """

    per_worker: PerWorker
    """The tensors of each local worker."""
    weights: Sequence[float]
    """One number for each local worker. Over all workers of the mean they add up to 1."""
    origin: Sequence[Tensor]
    """The global parameters, from which the workers' are subtracted. May be in host memory.

    They are rounded to the type of a worker's parameters before the subtraction. Empty: what
    workers contribute is added up as it is, without a subtraction.
    """
    wire: WireFormat | None = None
    """The wire format; None: differences are sent uncompressed."""
    feedback: Feedback = field(default_factory=Feedback)
    """Feedback that decides which part of encoding errors is kept, if there are residuals."""
    residuals: PerWorker = ()
    """Unsent values of each local worker with error feedback, except for those in its parameters.
    Changed in place. Empty: encoding errors are lost."""


class BufferPool:
    """Memory for buckets that is kept between reductions.

    Allocating it each time would take more time than filling it.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def buckets(
        self, tensors: Sequence[Tensor], indices: Sequence[int], dtype: torch.dtype, count: int = 1
    ) -> Tensor:
        """Flat tensors, (count, elements), with room for this rank's shards of the tensors of one
        bucket.

        Args:
            tensors: All tensors of a reduction.
            indices: Those in this bucket; see `bucket_indices`.
        """
        shards = [local(tensors[index]) for index in indices]
        size, device = sum(shard.numel() for shard in shards), shards[0].device
        # The tensors' own type is part of the name: bf16 and float32 tensors are in different
        # buckets, but both are added up in float32, and would have the same memory.
        name = (is_sharded(tensors[indices[0]]), shards[0].dtype)
        return self.rows(name, count, size, dtype, device)

    def rows(
        self, name: object, count: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of shape (count, size); the next call with this name gives the same memory."""
        key = (name, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count * size:
            self._buffers[key] = torch.empty(count * size, dtype=dtype, device=device)
        return self._buffers[key][: count * size].view(count, size)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which tensors of this type are added up: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def rounded_origin(origin: Sequence[Tensor], entries: Sequence[Tensor]) -> list[Tensor]:
    """The global parameters as a worker received them: on its device, rounded to its data type,
    which all its entries have.
    """
    return converted(origin, entries[0].dtype, entries[0].device)


def bucket_indices(tensors: Sequence[Tensor]) -> list[tuple[bool, list[int]]]:
    """Group tensors into buckets by data type, by device, and by whether they are sharded:
    (sharded, indices of the tensors) of each.
    """
    found: dict[tuple[bool, str, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (is_sharded(tensor), str(tensor.dtype), str(tensor.device))
        found.setdefault(key, []).append(index)
    return [(key[0], found[key]) for key in sorted(found)]


def bucket_views(
    buckets: Tensor, tensors: Sequence[Tensor], indices: Sequence[int]
) -> list[tuple[int, Tensor]]:
    """Views of buckets, one for each tensor in them.

    buckets: Shape (..., elements); see `BufferPool.buckets`.

    Returns:
        (index, view) of each tensor; a view has the shape (..., *shape of this rank's shard).
    """
    shards = [local(tensors[index]) for index in indices]
    views = torch.split(buckets, [shard.numel() for shard in shards], dim=-1)
    return [
        (index, view.view((*view.shape[:-1], *shard.shape)))
        for index, view, shard in zip(indices, views, shards, strict=True)
    ]


def filled_pieces(
    given: Contributions,
    indices: Sequence[int],
    buckets: Tensor,
    norms_sq: Tensor | None = None,
    *,
    whole: bool = False,
) -> Iterator[Tensor]:
    """Fill the buckets of these tensors, see `fill_weighted`, and yield each piece as soon as it is
    full.

    Pieces are consecutive tensors of all buckets, of shape (count, elements). They have at least
    PIECE elements of each, except the last. If nothing is sent before all are full (`whole`), a GPU
    fills them at once; a CPU does not, so that sums of squares have the same bits.
    """
    first = begin = end = 0
    fewest = buckets.shape[1] if whole and buckets.is_cuda else PIECE
    for following, index in enumerate(indices, 1):
        end += local(given.per_worker[0][index]).numel()
        if end - begin >= fewest or begin < end == buckets.shape[1]:
            piece = buckets[:, begin:end]
            fill_weighted(given, indices[first:following], piece, norms_sq)
            yield piece
            first, begin = following, end


@torch.no_grad()
def fill_weighted(
    given: Contributions, indices: Sequence[int], results: Tensor, norms_sq: Tensor | None = None
) -> None:
    """Set results to the workers' terms of some tensors, or a single result to their sum.

    A term is a worker's entry, or origin - entry, times its weight. It is rounded before it is
    added to others, so a sum has the same bits wherever the terms are added. Differences are taken
    before they are added up, because they are small and sums of parameters would round. The origin
    is first rounded to the entries' data type. Workers start from the rounded values, so a worker
    that has not moved contributes exactly zero.

    Args:
        results: Where to write these tensors one after another, of shape (workers, elements), or
            (1, elements) for the sum in the order of the workers; its type is at least as precise
            as the entries'.
        norms_sq: float64 of shape (workers,). The squared norm of each worker's term is added.
    """
    tensors = [[local(entry[index]) for index in indices] for entry in given.per_worker]
    origin = [[local(given.origin[index]) for index in indices]] if given.origin else []
    begin = 0
    for entries in _flat_parts([*tensors, *origin]):
        filled = results[:, begin : begin + len(entries[0])]
        begin += len(entries[0])
        if origin:  # Once for all workers: it may come from host memory.
            start = entries[-1].to(results.device, entries[0].dtype).to(results.dtype)
        for worker, weight in enumerate(given.weights):
            added = worker >= len(results)  # There is no row for it: it is added to the first one.
            term = torch.empty_like(filled[0]) if added else filled[worker]
            entry = entries[worker].to(results.dtype)
            if not weight:  # It may hold what is not finite: a mask, or a worker that is left out.
                term.zero_()
            elif origin:
                torch.sub(start, entry, out=term).mul_(weight)
            else:
                torch.mul(entry, weight, out=term)
            if norms_sq is not None:
                norms_sq[worker].add_(block_squares(term))
            if added:
                filled[0].add_(term)


def _flat_parts(sources: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same part of each source's tensors, flat: a block of a large tensor, or several
    small ones.
    """
    for part in together(sources[0]):
        flat = [[tensor.reshape(-1) for tensor in source[part]] for source in sources]
        yield from blocks([torch.cat(own) if len(own) > 1 else own[0] for own in flat])


def together(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Consecutive tensors that one operation handles together, of one data type and device: on a
    CPU so few that the next operation finds them in the cache.
    """
    begin = elements = 0
    for end, tensor in enumerate(tensors):
        first, elements = tensors[begin], elements + tensor.numel()
        most = BLOCK if first.device.type == "cpu" else TOGETHER
        # A kernel for tensors of two types may write over the end of one (pytorch issue 173383).
        same = (tensor.dtype, tensor.device) == (first.dtype, first.device)
        if begin < end and not (same and elements <= most):
            yield slice(begin, end)
            begin, elements = end, tensor.numel()
    if tensors:
        yield slice(begin, len(tensors))


def blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of tensors of one size, the same part of each at a time; see `BLOCK`."""
    length = BLOCK if tensors[0].device.type == "cpu" else BLOCK_ON_GPU
    return zip(*(torch.split(tensor.reshape(-1), length) for tensor in tensors), strict=True)


def block_squares(block: Tensor) -> Tensor:
    """Sum of squares of a block, as a float64 scalar.

    It is added up pairwise in the block's own data type. That keeps six digits, enough for the
    statistics of a sync; in float64 it would take longer than the sync's sum itself.
    """
    return block.square().sum().double()


def sum_of_squares(tensor: Tensor) -> float:
    """Sum of squares of a whole tensor, the same on every placement; see `block_squares`."""
    return float(sum(block_squares(block) for (block,) in blocks([tensor])))
