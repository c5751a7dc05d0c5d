"""Sums of encoded blocks over several islands, the groups of ranks that serve the same workers.

If the sum is encoded again (`sums_again`), each island adds up the rows that its workers own, and
both directions are compressed. Sums of sparse blocks are not sparse, so every island receives all
of these blocks, and likewise of two workers.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.all_to_all import start_all_to_all, wait_for
from adloco.distributed.comm.compressed import Rows, add_decoded
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.wire.wire_format import WireFormat


def sum_by_owners(
    blocks: Tensor,
    wire: WireFormat,
    rows: Rows,
    group: dist.ProcessGroup,
    workers: Sequence[int],
    *,
    kept: bool,
) -> tuple[Tensor, Tensor | None, float]:
    """Sum blocks over all workers; each island adds up its share and sends the encoded sum to all.

    Args:
        blocks: The local workers' blocks, uint8 of shape (workers, rows, block_bytes).
        wire: The wire format.
        rows: What is known of the rows.
        group: One rank of each island.
        workers: Number of workers that each island hosts.
        kept: True if workers keep what the encoding of the sum loses.

    Returns:
        The decoded sum, float32 of shape (rows, block); what its encoding has lost in rows that
        workers here own, 0 in others (None if nobody keeps it); and the squared norm of these rows
        before their encoding.
    """
    num_workers = sum(workers)
    islands = torch.arange(len(workers)).repeat_interleave(torch.tensor(workers))[rows.owners]
    shares = islands.bincount(minlength=len(workers)).tolist()
    order = islands.argsort(stable=True)
    me = dist.get_rank(group)
    rows = rows[torch.split(order, shares)[me]]
    order = order.to(blocks.device)
    own = torch.split(order, shares)[me]
    parts = torch.split(blocks[:, order], shares, dim=1)
    received = blocks.new_empty(num_workers, shares[me], wire.block_bytes)
    from_islands = torch.split(received, list(workers))
    from_islands[me].copy_(parts[me])
    wait_for(start_all_to_all([part.contiguous() for part in parts], from_islands, group))
    total = add_decoded(received, wire, rows)
    sums = blocks.new_empty(*blocks.shape[1:])
    of_islands = torch.split(sums, shares)
    of_islands[me].copy_(wire.encode(total))
    wait_for(start_all_to_all([of_islands[me]] * len(workers), of_islands, group))
    summed = wire.decode(torch.empty_like(sums).index_copy_(0, order, sums))
    lost = None
    if kept:
        lost = torch.zeros_like(summed).index_copy_(0, own, total - summed[own])
    return summed, lost, squared_norm([total])


def sum_everywhere(
    blocks: Tensor, wire: WireFormat, rows: Rows, group: dist.ProcessGroup, workers: Sequence[int]
) -> tuple[Tensor, float]:
    """Sum blocks over all workers; every island receives all blocks and adds them up itself.

    Arguments as for `sum_by_owners`. Nothing is lost.

    Returns:
        The sum, float32 of shape (rows, block), and this island's part of its squared norm.
    """
    received = blocks.new_empty(sum(workers), *blocks.shape[1:])
    from_islands = torch.split(received, list(workers))
    from_islands[dist.get_rank(group)].copy_(blocks)
    wait_for(start_all_to_all([blocks] * len(workers), from_islands, group))
    total = add_decoded(received, wire, rows)
    return total, squared_norm([total]) / len(workers)
