"""Sums over workers that are sent uncompressed, in the order of the workers.

Each island owns a share of the elements. It receives that share from all workers, adds it up, and
sends the sum to all islands. So the sum has the same bits on any number of islands as in one
process, which an all-reduce does not promise. With one worker on each island the bytes are those of
a ring.
"""

import collections
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from adloco.distributed.all_to_all import Pending, start_all_to_all, wait_for
from adloco.distributed.comm.buckets import (
    BufferPool,
    Contributions,
    blocks,
    bucket_indices,
    bucket_views,
    filled_pieces,
    sum_dtype,
    sum_of_squares,
)
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.comm.sync_stats import SumStats
from adloco.distributed.dtensor import local, with_local
from adloco.distributed.traffic import num_bytes, ring


class PlainSum:
    """The weighted sum of what workers contribute, uncompressed."""

    @torch.no_grad()
    def __init__(
        self, given: Contributions, islands: Islands, pool: BufferPool, *, overlapped: bool
    ) -> None:
        """
        overlapped: True to start no exchange yet; False to exchange each piece of a bucket
            while the next one is filled.
        """
        like, workers = given.per_worker[0], len(given.weights)
        device = local(like[0]).device if like else None
        norms_sq = torch.zeros(workers, dtype=torch.float64, device=device)
        self._like, self._islands, self._measured = like, islands, bool(given.origin)
        self._pieces: list[OrderedSum] = []
        self._buckets: list[tuple[bool, list[int], int, Tensor]] = []
        """(sharded, indices, elements, this rank's slice of the sum) of each bucket."""
        sent_bytes = 0
        for sharded, indices in bucket_indices(like):
            # One island needs no terms, because it can add up its workers' at once.
            rows = 1 if islands.group is None else workers
            buckets = pool.buckets(like, indices, sum_dtype(like[indices[0]].dtype), rows)
            measured = norms_sq if given.origin and islands.counts(sharded) else None
            mine, whole = buckets, islands.group is None or islands.same(sharded) is not None
            pieces = filled_pieces(given, indices, buckets, measured, whole=whole)
            if whole:  # A slice needs all pieces.
                collections.deque(pieces, maxlen=0)
                mine = islands.slices(buckets, sharded)
                pieces = iter([mine])
            if islands.group is not None:
                self._start(pieces, sharded, pool, overlapped)
            if islands.num_workers > 1 and islands.owns(sharded):
                sent_bytes += num_bytes([mine[:1]]) * workers
            self._buckets.append((sharded, indices, buckets.shape[1], mine[0]))
        sent_sq = norms_sq.tolist()
        self.stats = SumStats(wanted_sq=sent_sq, sent_sq=sent_sq, error_sq=[0.0] * workers)
        self.stats.num_bytes = islands.traffic.add(sent_bytes, ring(islands.num_workers))

    def _start(
        self, pieces: Iterable[Tensor], sharded: bool, pool: BufferPool, overlapped: bool
    ) -> None:
        for terms in pieces:
            name = ("received", sharded, len(self._pieces))
            memory = functools.partial(pool.rows, name, dtype=terms.dtype, device=terms.device)
            self._pieces.append(OrderedSum(terms, self._islands, memory))
            if not overlapped:  # This piece is sent while the next one is filled.
                self._pieces[-1].exchange()

    def transfer(self) -> None:
        for piece in self._pieces:
            piece.exchange()
        for piece in self._pieces:
            piece.add_up()
        for piece in self._pieces:
            piece.finish()
        if self._measured and self._islands.me == 0:
            self.stats.total_sq = sum(
                sum_of_squares(mine)
                for sharded, _, _, mine in self._buckets
                if self._islands.owns(sharded)
            )

    def result(self) -> list[Tensor]:
        results = list(self._like)
        for sharded, indices, numel, mine in self._buckets:
            whole = self._islands.joined(mine, numel, sharded)
            for index, view in bucket_views(whole, self._like, indices):
                results[index] = with_local(view, like=self._like[index])
        return results


class OrderedSum:
    """The sum of a piece over several islands, in three steps.

    The first two start what the next one waits for.
    """

    def __init__(
        self, terms: Tensor, islands: Islands, memory: Callable[[int, int], Tensor]
    ) -> None:
        """
        Args:
            terms: One row for each local worker, in their order; shape (workers, elements). The
                sum is written into the first row.
            memory: Gives a tensor of this shape for what is received, with the terms' data type.
        """
        assert islands.group is not None and islands.me is not None
        self._terms, self._group, self._me = terms, islands.group, islands.me
        # Equal shares, the last ones shorter or empty.
        count = len(islands.workers)
        share = -(-terms.shape[1] // count)
        self._shares = [slice(share * island, share * (island + 1)) for island in range(count)]
        others = [each for island, each in enumerate(islands.workers) if island != self._me]
        own = self._terms[:, self._shares[self._me]]
        # By island. What this one has itself is not copied.
        self._rows = list(torch.split(memory(sum(others), own.shape[1]), others))
        self._rows.insert(self._me, own)
        self._works: list[Pending] = []

    def exchange(self) -> None:
        """Start to send each island its share of the terms, unless that has been started."""
        if not self._works:
            sent = [self._terms[:, share].contiguous() for share in self._shares]
            self._works = start_all_to_all(sent, self._rows, self._group)

    def add_up(self) -> None:
        """Add up this island's share, and start to send the sum to all islands."""
        wait_for(self._works)
        own = self._terms[0, self._shares[self._me]]
        for total, first, *others, last in blocks(
            [own, *(row for rows in self._rows for row in rows)]
        ):
            for term in others:
                first.add_(term)
            # Not earlier, because the total is the memory of a term.
            torch.add(first, last, out=total)
        sums = [self._terms[0, share] for share in self._shares]
        self._works = start_all_to_all([own] * len(sums), sums, self._group)

    def finish(self) -> None:
        """Wait until the whole sum is in the first row."""
        wait_for(self._works)
