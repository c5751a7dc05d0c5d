"""A sum over the workers of several islands, in the order of the workers.

Each island owns a share of the elements. It receives that share from all workers, adds it up, and
sends the sum to all islands. So the sum has the same bits on any number of islands as in one
process, which an all-reduce does not promise. With one worker on each island the bytes are those of
a ring.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OrderedSum:
    """A sum in three steps. The first two start what the next one waits for."""

    def __init__(
        self, terms: Tensor, result: Tensor, group: dist.ProcessGroup, workers: Sequence[int]
    ) -> None:
        """
        Args:
            terms: One row for each local worker, in their order; shape (workers, elements).
            result: Where the sum is written; shape (elements,). May be the memory of the terms.
            group: One rank of each island, in the order of their workers.
            workers: Number of workers that each island hosts.
        """
        self._terms, self._result, self._group, self._workers = terms, result, group, workers
        # Equal shares, the last ones shorter or empty, because all_gather sends equal parts.
        self._share = -(-len(result) // len(workers))
        self._work: Any = None

    def exchange(self) -> None:
        """Start to send each island its share of the terms, unless that has been started."""
        if self._work:
            return
        me = dist.get_rank(self._group)
        parts = [
            self._terms[:, self._share * island :][:, : self._share]
            for island in range(len(self._workers))
        ]
        self._received = parts[me].new_empty(sum(self._workers), parts[me].shape[1])
        sent = self._terms[0] if len(self._terms) == 1 else _joined(parts)
        self._work = dist.all_to_all_single(
            self._received.view(-1),
            sent,
            [count * parts[me].shape[1] for count in self._workers],
            [part.numel() for part in parts],
            group=self._group,
            async_op=True,
        )

    def add_up(self) -> None:
        """Add up this island's share, and start to send the sum to all islands."""
        self._work.wait()
        first, second, *others = self._received
        own = torch.add(first, second)
        for term in others:
            own.add_(term)
        whole = len(self._workers) * self._share
        # Into the result at once, if the shares are equal.
        self._sums = self._result if len(self._result) == whole else own.new_empty(whole)
        padding = own.new_zeros(self._share - len(own))
        total = torch.cat([own, padding]) if len(padding) else own
        self._work = dist.all_gather_single(self._sums, total, group=self._group, async_op=True)
        del self._received

    def finish(self) -> None:
        """Write the sum into the result."""
        self._work.wait()
        if self._sums is not self._result:
            self._result.copy_(self._sums[: len(self._result)])
        del self._sums


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
