"""Sums of encoded blocks over several islands, the groups of ranks that serve the same workers.

If the sum is encoded again (`WireFormat.sums_in_blocks`), each island adds up a share of the rows,
and both directions are compressed. Sums of sparse blocks are not sparse, so every island receives
all of these blocks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.codecs.codec import WireFormat
from adloco.distributed.comm.bucket_exchange import gathered
from adloco.distributed.comm.compressed import add_decoded
from adloco.distributed.parallel.gradient_norms import squared_norm


def sum_by_owners(
    blocks: Tensor, codec: WireFormat, group: dist.ProcessGroup, workers: Sequence[int]
) -> tuple[Tensor, float]:
    """Sum blocks over all workers; each island adds up its share and sends the encoded sum to all.

    Args:
        blocks: The local workers' blocks, uint8 of shape (workers, rows, block_bytes).
        codec: The wire format.
        group: One rank of each island.
        workers: Number of workers that each island hosts.

    Returns:
        The decoded sum, float32 of shape (rows, block), and the squared norm of this island's
        share before its encoding.
    """
    num_workers = sum(workers)
    shares = [len(part) for part in torch.arange(blocks.shape[1]).tensor_split(len(workers))]
    me = dist.get_rank(group)
    for_others = [part.reshape(-1) for part in torch.split(blocks, shares, dim=1)]
    own, for_others[me] = for_others[me], blocks.new_empty(0)
    sizes = [
        0 if island == me else count * shares[me] * codec.block_bytes
        for island, count in enumerate(workers)
    ]
    received = blocks.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        torch.cat(for_others),
        sizes,
        [part.numel() for part in for_others],
        group=group,
    )
    from_islands = list(torch.split(received, sizes))
    from_islands[me] = own
    total = add_decoded(
        torch.cat(from_islands).view(num_workers, shares[me], codec.block_bytes), codec
    )
    sums = gathered(codec.encode(total), max(shares), group)
    rows = torch.cat([rows[:share] for rows, share in zip(sums, shares, strict=True)])
    return codec.decode(rows), squared_norm([total])


def sum_everywhere(
    blocks: Tensor, codec: WireFormat, group: dist.ProcessGroup, workers: Sequence[int]
) -> tuple[Tensor, float]:
    """Sum blocks over all workers; every island receives all blocks and adds them up itself.

    Arguments as for `sum_by_owners`.

    Returns:
        The sum, float32 of shape (rows, block), and this island's part of its squared norm.
    """
    received = gathered(blocks, max(workers), group)
    total = add_decoded(
        torch.cat([some[:count] for some, count in zip(received, workers, strict=True)]), codec
    )
    return total, squared_norm([total]) / len(workers)
