"""Reductions among workers on several islands, by collectives of torch.distributed.

Uncompressed tensors are all-reduced. In a wire format, each island owns a share of the blocks. It
receives that share from all workers, adds it up in float32, encodes the sum and sends it to all. So
transfers are compressed in both directions, and every island decodes the same bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.codecs.codec import WireFormat
from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.block_sums import sum_by_owners, sum_everywhere
from adloco.distributed.comm.bucket_exchange import (
    BucketExchange,
    gathered,
    own_slice,
    slice_rows,
)
from adloco.distributed.comm.buckets import (
    BufferPool,
    PerWorker,
    bucket_indices,
    bucket_views,
    fill_weighted_sum,
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
from adloco.distributed.comm.compressed import CompressedSum, crossings
from adloco.distributed.dtensor import is_sharded, local
from adloco.distributed.traffic import Traffic, num_bytes, ring


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

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        if not self._member or not per_worker[0]:
            return []
        exchange = self._started(
            per_worker[0],
            lambda index, view: fill_weighted_sum(
                view, [local(entry[index]) for entry in per_worker], weights, None
            ),
            self._all_reduce,
            self._pool,
            counted=len(per_worker),
            times=ring(self.num_workers),
        )
        return ExchangeWork(exchange, None).wait()

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        if not self._member or not given.per_worker[0]:
            return CompletedWork([], SumStats.zero(len(given.weights)))
        exchange: Exchange
        if given.codec is None:
            exchange = self._differences(given, BufferPool() if overlapped else self._pool)
        else:
            exchange = CompressedSum(
                given, given.codec, self._counts, self._sum_of_blocks, self._joined
            )
        return ExchangeWork(exchange, self._transfers if overlapped else None)

    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        if not self._member or not receivers or not tensors:
            return list(tensors)
        rank = self._rank_of(source)
        exchange = self._started(
            tensors,
            lambda index, view: view.copy_(local(tensors[index])),
            lambda bucket: dist.broadcast(bucket, rank, group=self._group, async_op=True),
            self._pool,
            counted=int(dist.get_rank() == rank),
            times=self.num_workers - 1,
            summed=False,
        )
        return ExchangeWork(exchange, None).wait()

    def _differences(self, given: Contributions, pool: BufferPool) -> BucketExchange:
        first = given.per_worker[0]
        norms_sq = torch.zeros(
            len(given.weights), dtype=torch.float64, device=local(first[0]).device
        )

        def fill(index: int, view: Tensor) -> None:
            entries = [local(entry[index]) for entry in given.per_worker]
            counted = norms_sq if self._counts(is_sharded(first[index])) else None
            fill_weighted_sum(
                view, entries, given.weights, local(given.origin[index]).to(view.device), counted
            )

        exchange = self._started(
            first,
            fill,
            self._all_reduce,
            pool,
            counted=len(given.weights),
            times=ring(self.num_workers),
        )
        sent_bytes, exchange.stats = exchange.stats.num_bytes, SumStats.lossless(norms_sq)
        exchange.stats.num_bytes = sent_bytes
        return exchange

    def _all_reduce(self, bucket: Tensor) -> Any:
        return dist.all_reduce(bucket, group=self._group, async_op=True)

    @torch.no_grad()
    def _started(
        self,
        like: Sequence[Tensor],
        fill: Callable[[int, Tensor], Any],
        collective: Callable[[Tensor], Any],
        pool: BufferPool,
        *,
        counted: int,
        times: float,
        summed: bool = True,
    ) -> BucketExchange:
        """Fill buckets one after another and start a collective on each large piece.

        Args:
            like: Tensors with the shapes and shards of the result.
            fill: Called with each tensor's index and its view of a bucket, to fill it.
            collective: Starts an exchange of a piece and returns its work.
            pool: Memory for the buckets.
            counted: Local workers that send. Each is counted as if it had an island of its own.
            times: How often each byte leaves an island; see `Traffic.add`.
            summed: True if the collective adds up. Half-precision buckets are then float32.
        """
        exchange = BucketExchange(like, self._joined, len(self._workers))
        for sharded, indices in bucket_indices(like):
            dtype = like[indices[0]].dtype
            bucket = pool.bucket(like, indices, sum_dtype(dtype) if summed else dtype)
            views, replica_group = bucket_views(bucket, like, indices), self._replica_group(sharded)
            if replica_group is None:
                # A piece is in flight while the next one is filled.
                exchange.works += [
                    collective(piece) for piece in filled_pieces(bucket, views, fill)
                ]
                mine = bucket
            else:
                for index, view in views:
                    fill(index, view)
                mine = own_slice(bucket, replica_group)
                exchange.works.append(collective(mine))
            exchange.stats.num_bytes += self._traffic.add(counted * num_bytes([mine]), times)
            exchange.buckets.append((sharded, indices, bucket.numel(), mine))
        return exchange

    def _sum_of_blocks(
        self, blocks: Tensor, codec: WireFormat, sharded: bool, stats: SumStats
    ) -> Tensor:
        """Compute this rank's slice of the sum; see `BlockSum`."""
        replica_group = self._replica_group(sharded)
        mine = (
            blocks
            if replica_group is None
            else torch.stack([own_slice(one, replica_group) for one in blocks])
        )
        stats.num_bytes += self._traffic.add(mine.numel(), crossings(codec, self.num_workers))
        sum_up = sum_by_owners if codec.sums_in_blocks else sum_everywhere
        values, total_sq = sum_up(mine, codec, self._group, self._workers)
        stats.total_sq += total_sq
        return values

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
