"""Sums of encoded blocks over all workers, which live on one island or on several.

The sum of more than two workers is encoded again: each island adds up the rows that its workers
own, and both directions are compressed. Of two workers each receives the other's rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adloco.distributed.all_to_all import start_all_to_all, wait_for
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.device import to_device
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.wire.wire_format import WireFormat

PIECE = 1 << 18
"""Values that a format handles at once on a CPU: what one operation writes is still in the cache
for the next.
"""
PIECE_ON_GPU = 1 << 24
"""Values that a format handles at once on a GPU, where each operation costs a kernel launch. On an
H100, 305M values take 13 ms in int4 in pieces of this size, 38 ms in pieces of a quarter of it, and
207 ms in pieces of a sixteenth (reproduce/LOG.md, 2026-11-23).
"""


@dataclass(frozen=True)
class Rows:
    """Facts about each row of blocks, in host memory: int64 tensors of shape (rows,)."""

    owners: Tensor
    """The worker that owns the row."""
    filled: Tensor
    """Number of values in the row that are not padding."""

    def __getitem__(self, which: slice | Tensor) -> "Rows":
        return Rows(self.owners[which], self.filled[which])

    def encoded(self, values: Tensor, wire: WireFormat) -> Tensor:
        """Encode rows. Formats take means over a row, which zeros would make too small. So they
        see the values of a short row again and again in place of its padding.

        values: (rows, block), whose padding is 0.
        """
        blocks, short = wire.encode(values), self._short(wire.block)
        if len(short):
            again = torch.arange(wire.block, device="cpu") % self.filled[short, None]
            place, again = to_device((short, again), values.device)
            blocks[place] = wire.encode(values[place].gather(1, again))
        return blocks

    def without_padding(self, values: Tensor) -> Tensor:
        """Set padding to 0, in place; not all formats decode it so. values: (rows, block)."""
        short = self._short(values.shape[1])
        if len(short):
            beyond = torch.arange(values.shape[1], device="cpu") >= self.filled[short, None]
            place, beyond = to_device((short, beyond), values.device)
            values[place] = values[place].masked_fill_(beyond, 0.0)
        return values

    def _short(self, block: int) -> Tensor:
        """The rows that are not full."""
        return torch.nonzero(self.filled < block).flatten()


def sum_blocks(
    blocks: Tensor, wire: WireFormat, rows: Rows, islands: Islands, *, kept: bool
) -> tuple[Tensor, Tensor | None, float]:
    """Sum blocks over all workers.

    Args:
        blocks: The local workers' blocks, uint8 of shape (workers, rows, block_bytes).
        kept: True if workers keep what the encoding of the sum loses.

    Returns:
        The decoded sum, float32 of shape (rows, block); what its encoding has lost, 0 in rows of
        other islands' workers (None if the sum is not encoded again, or if nobody keeps it), both
        with any values in place of padding; and
        this island's part of the squared norm of the sum before its encoding.
    """
    # Two workers' sums are not encoded again, because sending both's blocks takes as many bytes.
    again = islands.num_workers > 2
    if islands.group is not None and again:
        return _sum_by_owners(blocks, wire, rows, islands, kept=kept)
    everyone = blocks if islands.group is None else _from_everyone(blocks, islands)
    total = add_decoded(everyone, wire, rows)
    sent = wire.decode(rows.encoded(total, wire)) if again else total
    lost = total - sent if again and kept else None
    # Last, because it waits for the device.
    return sent, lost, squared_norm([total]) / len(islands.workers)


def _from_everyone(blocks: Tensor, islands: Islands) -> Tensor:
    """The blocks of the workers of all islands."""
    assert islands.group is not None and islands.me is not None
    received = blocks.new_empty(islands.num_workers, *blocks.shape[1:])
    from_islands = torch.split(received, list(islands.workers))
    from_islands[islands.me].copy_(blocks)
    wait_for(start_all_to_all([blocks] * len(from_islands), from_islands, islands.group))
    return received


def _sum_by_owners(
    blocks: Tensor, wire: WireFormat, rows: Rows, islands: Islands, *, kept: bool
) -> tuple[Tensor, Tensor | None, float]:
    """Each island adds up the rows that its workers own, and sends the encoded sum to all."""
    workers, group, me = islands.workers, islands.group, islands.me
    assert group is not None and me is not None
    counts = torch.tensor(workers, device="cpu")
    owners = torch.arange(len(workers), device="cpu").repeat_interleave(counts)[rows.owners]
    shares = owners.bincount(minlength=len(workers)).tolist()
    order = owners.argsort(stable=True)
    rows = rows[torch.split(order, shares)[me]]
    order = to_device(order, blocks.device)
    own = torch.split(order, shares)[me]
    parts = torch.split(blocks[:, order], shares, dim=1)
    received = blocks.new_empty(sum(workers), shares[me], wire.block_bytes)
    from_islands = torch.split(received, list(workers))
    from_islands[me].copy_(parts[me])
    wait_for(start_all_to_all([part.contiguous() for part in parts], from_islands, group))
    total = add_decoded(received, wire, rows)
    sums = blocks.new_empty(*blocks.shape[1:])
    of_islands = torch.split(sums, shares)
    of_islands[me].copy_(rows.encoded(total, wire))
    wait_for(start_all_to_all([of_islands[me]] * len(workers), of_islands, group))
    summed = wire.decode(torch.empty_like(sums).index_copy_(0, order, sums))
    lost = None
    if kept:
        lost = torch.zeros_like(summed).index_copy_(0, own, total - summed[own])
    return summed, lost, squared_norm([total])


def add_decoded(blocks: Tensor, wire: WireFormat, about: Rows) -> Tensor:
    """Add up workers' blocks, uint8 of shape (workers, rows, block_bytes), in the order of the
    workers, which is the same on every placement: float32 of shape (rows, block).
    """
    total = torch.zeros(blocks.shape[1], wire.block, dtype=torch.float32, device=blocks.device)
    for rows in in_pieces(total, wire):
        for one in blocks:
            total[rows] += wire.decode(one[rows])
    return about.without_padding(total)


def in_pieces(values: Tensor, wire: WireFormat) -> Iterator[slice]:
    """Cut rows of blocks into slices that a format handles at once; see `PIECE`."""
    size = PIECE if values.device.type == "cpu" else PIECE_ON_GPU
    step = max(1, size // wire.block)
    return (slice(begin, begin + step) for begin in range(0, len(values), step))
