"""An exchange in which every rank of a group sends to every other one, and receives from it.

On a slow link both directions must be busy at once. In gloo a rank may send once the other one has
said that it is ready to receive, and that message waits behind the data that leaves on the same
connection. So between two ranks, one of which comes a little later, gloo's `all_to_all` and
`all_gather` together take 1.5 times as long as the link needs (reproduce/LOG.md, 2026-11-23, "why a
sync took longer than its bytes over a slow link"). Here every rank says that it is ready for
everything before it sends anything.

Between islands everything goes by gloo, over TCP: slow links need no more, a group of gloo can be
left when a rank has failed, and islands of one rank may share a GPU. What is on a GPU is sent from
pinned memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Pending = Callable[[], Any]
"""Returns once a part of an exchange has ended."""


def start_all_to_all(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Pending]:
    """Start an exchange, for which `wait_for` waits. This rank's own entries stay as they are.

    Args:
        sent: What each rank of the group gets from this one; contiguous.
        received: Where to write what each rank sends; contiguous, of the size that is sent.
    """
    me, ranks = dist.get_rank(group), len(sent)
    arrivals: list[Pending] = []
    if is_staged(sent[me], group):
        # The same tensor may be sent to several ranks.
        different = {id(tensor): tensor for at, tensor in enumerate(sent) if at != me}
        copies = {key: pinned_copy(tensor) for key, tensor in different.items()}
        sent = [copies.get(id(tensor), tensor) for tensor in sent]
        hosts = [tensor if at == me else _pinned_like(tensor) for at, tensor in enumerate(received)]
        arrivals = [
            partial(tensor.copy_, hosts[at], non_blocking=True)
            for at, tensor in enumerate(received)
            if at != me
        ]
        received = hosts
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
    works = dist.batch_isend_irecv(operations) if operations else []
    return [*(work.wait for work in works), *arrivals]


def wait_for(parts: Iterable[Pending]) -> None:
    """Wait until an exchange has ended."""
    for wait in parts:
        wait()


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Set a tensor to that of rank `source` of the default group, which must be in the group."""
    if not is_staged(tensor, group):
        dist.broadcast(tensor, source, group=group)
        return
    host = pinned_copy(tensor)
    dist.broadcast(host, source, group=group)
    tensor.copy_(host, non_blocking=True)


def is_staged(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """True if a tensor goes through the memory of the CPU: from a GPU, by gloo."""
    return tensor.is_cuda and dist.get_backend(group) == dist.Backend.GLOO


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which a GPU can read and write while it computes."""
    return _pinned_like(tensor).copy_(tensor)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
