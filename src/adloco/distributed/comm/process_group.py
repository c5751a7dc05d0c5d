"""Reductions among workers on several islands, by collectives of torch.distributed.

Each island owns a share of the elements. It receives that share from all workers, adds it up in the
order of the workers, and sends the sum to all islands. So a sum has the same bits on any number of
islands. In a wire format the sum is encoded again, so that transfers are compressed in both
directions, and every island decodes the same bytes.
"""

import collections
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.block_sums import sum_by_owners, sum_everywhere
from adloco.distributed.comm.bucket_exchange import (
    BucketExchange,
    gathered,
    own_slice,
    slice_of,
    slice_rows,
)
from adloco.distributed.comm.buckets import (
    BufferPool,
    PerWorker,
    bucket_indices,
    bucket_views,
    fill_weighted_terms,
    filled_pieces,
    sum_dtype,
)
from adloco.distributed.comm.comm import (
    CompletedWork,
    Contributions,
    Exchange,
    ExchangeWork,
    SumStats,
    Work,
)
from adloco.distributed.comm.compressed import CompressedSum, Rows, crossings
from adloco.distributed.comm.ordered_sum import OrderedSum
from adloco.distributed.dtensor import is_sharded, local, with_local
from adloco.distributed.traffic import Traffic, num_bytes, ring
from adloco.distributed.wire.wire_format import WireFormat, sums_again


class GroupComm:
    """Reductions among a set of workers on several islands."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replica_group: Callable[[bool], dist.ProcessGroup | None],
        workers: Sequence[int],
        member: bool,
        rank_of: Callable[[int], int],
        traffic: Traffic,
        transfers: Transfers,
        pool: BufferPool,
    ) -> None:
        """
        Args:
            group: The ranks that have this rank's position on each of these islands.
            replica_group: Gives the ranks of this island that have the same sharded (True) or
                other tensors as this rank, or None if it is alone.
            workers: Number of workers that each island hosts.
            member: True if this island hosts any of them.
            rank_of: Gives the rank with this rank's position on a worker's island.
            traffic: Counts bytes.
            transfers: Runs exchanges in the background.
            pool: Memory for buckets.
        """
        self.num_workers = sum(workers)
        self._group = group
        self._replica_group = replica_group
        self._workers = workers
        self._member = member
        self._rank_of = rank_of
        self._traffic = traffic
        self._transfers = transfers
        self._pool = pool

    def mean(
        self, per_worker: PerWorker, weights: Sequence[float], wire: WireFormat | None = None
    ) -> list[Tensor]:
        if not self._member or not per_worker[0]:
            return []
        if wire is not None:
            given = Contributions(per_worker=per_worker, weights=weights, origin=(), wire=wire)
            return self.pseudo_gradient(given).wait()
        exchange = self._summed(
            per_worker,
            lambda index, terms: fill_weighted_terms(
                terms, [local(entry[index]) for entry in per_worker], weights, None
            ),
        )
        return ExchangeWork(exchange, None).wait()

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        if not self._member or not given.per_worker[0]:
            return CompletedWork([], SumStats.zero(len(given.weights)))
        exchange: Exchange
        if given.wire is None:
            exchange = self._differences(given, overlapped)
        else:
            exchange = CompressedSum(
                given,
                given.wire,
                self._here,
                self.num_workers,
                self._counts,
                self._sum_of_blocks,
                self._joined,
            )
        return ExchangeWork(exchange, self._transfers if overlapped else None)

    @torch.no_grad()
    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        if not self._member or not receivers or not tensors:
            return list(tensors)
        rank = self._rank_of(source)
        results = list(tensors)
        for sharded, indices in bucket_indices(tensors):
            (bucket,) = self._pool.buckets(tensors, indices, tensors[indices[0]].dtype)
            for index, view in bucket_views(bucket, tensors, indices):
                view.copy_(local(tensors[index]))
            mine = self._slices(bucket[None], sharded)[0]
            dist.broadcast(mine, rank, group=self._group)
            sent_bytes = num_bytes([mine]) if dist.get_rank() == rank else 0
            self._traffic.add(sent_bytes, self.num_workers - 1)
            received = self._joined(mine, len(bucket), sharded)
            for index, view in bucket_views(received, tensors, indices):
                results[index] = with_local(view, like=tensors[index])
        return results

    def _differences(self, given: Contributions, overlapped: bool) -> BucketExchange:
        first = given.per_worker[0]
        norms_sq = torch.zeros(
            len(given.weights), dtype=torch.float64, device=local(first[0]).device
        )

        def fill(index: int, terms: Tensor) -> None:
            entries = [local(entry[index]) for entry in given.per_worker]
            origin = local(given.origin[index]).to(terms.device)
            counted = norms_sq if self._counts(is_sharded(first[index])) else None
            fill_weighted_terms(terms, entries, given.weights, origin, counted)

        exchange = self._summed(given.per_worker, fill, overlapped=overlapped)
        sent_bytes, exchange.stats = exchange.stats.num_bytes, SumStats.lossless(norms_sq)
        exchange.stats.num_bytes = sent_bytes
        return exchange

    @torch.no_grad()
    def _summed(
        self,
        per_worker: PerWorker,
        fill: Callable[[int, Tensor], object],
        *,
        overlapped: bool = False,
    ) -> BucketExchange:
        """Fill buckets with the terms of a sum, and make the sum of each large piece.

        Args:
            per_worker: The tensors of each local worker.
            fill: Called with each tensor's index and its view of the local workers' buckets, of
                shape (workers, *shape), to fill it.
            overlapped: True to start no exchange, and to use memory that nobody else does; False
                to exchange each piece while the next one is filled.
        """
        like, workers = per_worker[0], len(per_worker)
        pool = BufferPool() if overlapped else self._pool
        exchange = BucketExchange(like, self._joined, counts=dist.get_rank(self._group) == 0)
        for sharded, indices in bucket_indices(like):
            buckets = pool.buckets(like, indices, sum_dtype(like[indices[0]].dtype), workers)
            pieces = filled_pieces(buckets, bucket_views(buckets, like, indices), fill)
            if self._replica_group(sharded) is None:
                mine = buckets
            else:  # A slice needs all pieces.
                collections.deque(pieces, maxlen=0)
                mine = self._slices(buckets, sharded)
                pieces = iter([mine])
            for terms in pieces:
                name = ("received", sharded, len(exchange.sums))
                memory = functools.partial(pool.rows, name, dtype=terms.dtype, device=terms.device)
                exchange.sums.append(
                    OrderedSum(terms, terms[0], self._group, self._workers, memory)
                )
                if not overlapped:
                    exchange.sums[-1].exchange()
            exchange.stats.num_bytes += self._traffic.add(num_bytes([mine]), ring(self.num_workers))
            exchange.buckets.append((sharded, indices, buckets.shape[1], mine[0]))
        return exchange

    def _slices(self, rows: Tensor, sharded: bool) -> Tensor:
        """This rank's slice of each row, which all ranks of the replica group have."""
        replica_group = self._replica_group(sharded)
        if replica_group is None:
            return rows
        return torch.stack([own_slice(row, replica_group) for row in rows])

    @property
    def _here(self) -> range:
        """Which of the workers this island hosts."""
        before = sum(self._workers[: dist.get_rank(self._group)])
        return range(before, before + self._workers[dist.get_rank(self._group)])

    def _sum_of_blocks(
        self,
        blocks: Tensor,
        wire: WireFormat,
        rows: Rows,
        sharded: bool,
        kept: bool,
        stats: SumStats,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute this rank's slice of the sum; see `BlockSum`."""
        mine = self._slices(blocks, sharded)
        stats.num_bytes += self._traffic.add(mine.numel(), crossings(wire, self.num_workers))
        replica_group = self._replica_group(sharded)
        if replica_group is not None:
            rows = rows[slice_of(len(rows.owners), replica_group)]
        lost = None
        if sums_again(wire, self.num_workers):
            values, lost, total_sq = sum_by_owners(
                mine, wire, rows, self._group, self._workers, kept=kept
            )
        else:
            values, total_sq = sum_everywhere(mine, wire, rows, self._group, self._workers)
        stats.total_sq += total_sq
        return values, lost

    def _counts(self, sharded: bool) -> bool:
        replica_group = self._replica_group(sharded)
        return replica_group is None or dist.get_rank(replica_group) == 0

    def _joined(self, mine: Tensor, rows: int, sharded: bool) -> Tensor:
        """Gather the slices of this island's ranks that have the same tensors: (rows, ...)."""
        replica_group = self._replica_group(sharded)
        if replica_group is None:
            return mine
        slices = gathered(mine, slice_rows(rows, replica_group), replica_group)
        self._traffic.inside += num_bytes([slices[0]])
        return slices.flatten(0, 1)[:rows]
