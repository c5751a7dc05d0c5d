"""An exchange in which every rank of a group sends to every other one, and receives from it.

On a slow link both directions must be busy at once. In gloo a rank may send once the other one has
said that it is ready to receive, and that message waits behind the data that leaves on the same
connection. So between two ranks, one of which comes a little later, gloo's `all_to_all` and
`all_gather` together take 1.5 times as long as the link needs (reproduce/LOG.md, 2026-11-23, "why a
sync took longer than its bytes over a slow link"). Here every rank says that it is ready for
everything before it sends anything.
"""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor


def start_all_to_all(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start an exchange. This rank's own entries stay as they are.

    Args:
        sent: What each rank of the group gets from this one; contiguous.
        received: Where to write what each rank sends; contiguous, of the size that is sent.
        group: The ranks.

    Returns:
        What `wait_for` waits for.
    """
    me, ranks = dist.get_rank(group), len(sent)
    # Each rank begins with its next neighbour, so that no rank is everybody's first.
    receives = [
        dist.P2POp(dist.irecv, received[rank], group=group, group_peer=rank)
        for rank in ((me - step) % ranks for step in range(1, ranks))
        if received[rank].numel()
    ]
    sends = [
        dist.P2POp(dist.isend, sent[rank], group=group, group_peer=rank)
        for rank in ((me + step) % ranks for step in range(1, ranks))
        if sent[rank].numel()
    ]
    operations = receives + sends
    return dist.batch_isend_irecv(operations) if operations else []


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until an exchange has ended."""
    for work in works:
        work.wait()
