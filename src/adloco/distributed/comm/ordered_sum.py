"""A sum over the workers of several islands, in the order of the workers.

Each island owns a share of the elements. It receives that share from all workers, adds it up, and
sends the sum to all islands. So the sum has the same bits on any number of islands as in one
process, which an all-reduce does not promise. With one worker on each island the bytes are those of
a ring.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.all_to_all import start_all_to_all, wait_for
from adloco.distributed.comm.buckets import blocks


class OrderedSum:
    """A sum in three steps. The first two start what the next one waits for."""

    def __init__(
        self,
        terms: Tensor,
        result: Tensor,
        group: dist.ProcessGroup,
        workers: Sequence[int],
        memory: Callable[[int, int], Tensor],
    ) -> None:
        """
        Args:
            terms: One row for each local worker, in their order; shape (workers, elements).
            result: Where the sum is written; shape (elements,). May be the memory of the terms.
            group: One rank of each island, in the order of their workers.
            workers: Number of workers that each island hosts.
            memory: Gives a tensor of this shape for what is received, with the terms' data type.
        """
        self._terms, self._result, self._group, self._workers = terms, result, group, workers
        # Equal shares, the last ones shorter or empty.
        share = -(-len(result) // len(workers))
        self._shares = [
            slice(share * island, share * (island + 1)) for island in range(len(workers))
        ]
        self._me = dist.get_rank(group)
        others = [count for island, count in enumerate(workers) if island != self._me]
        own = self._terms[:, self._shares[self._me]]
        # By island. What this one has itself is not copied.
        self._rows = list(torch.split(memory(sum(others), own.shape[1]), others))
        self._rows.insert(self._me, own)
        self._works: list[dist.Work] | None = None

    def exchange(self) -> None:
        """Start to send each island its share of the terms, unless that has been started."""
        if self._works is not None:
            return
        sent = [self._terms[:, share].contiguous() for share in self._shares]
        self._works = start_all_to_all(sent, self._rows, self._group)

    def add_up(self) -> None:
        """Add up this island's share, and start to send the sum to all islands."""
        wait_for(self._works or [])
        own = self._result[self._shares[self._me]]
        for total, first, *others, last in blocks(
            [own, *(row for rows in self._rows for row in rows)]
        ):
            for term in others:
                first.add_(term)
            # Not earlier, because the total may be the memory of a term.
            torch.add(first, last, out=total)
        sums = [self._result[share] for share in self._shares]
        self._works = start_all_to_all([own] * len(sums), sums, self._group)

    def finish(self) -> None:
        """Wait until the whole sum is in the result."""
        wait_for(self._works or [])
