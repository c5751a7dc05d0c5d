"""Reductions among workers that live on several islands. Each byte crosses between islands once:
ranks that hold the same take a slice each.

Tensors as they are are all-reduced. In a wire format, each island owns a share of the blocks: it
gets that share from all workers, adds it up in float32, encodes the sum and sends it to all, so
that what crosses is compressed both ways, and every island decodes the same bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.background import Transfers
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
from adloco.distributed.comm.compressed import CompressedSum, Join, add_decoded, crossings
from adloco.distributed.dtensor import is_sharded, local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import Traffic, num_bytes, ring


class GroupComm:
    """A set of workers on several islands, of which this one may host some."""

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
        """group: The ranks at this rank's place on each island. workers: How many workers each
        island hosts. member: Whether this island hosts any. replica_group, rank_of: See `Ranks`.
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

    def _differences(self, given: Contributions, pool: BufferPool) -> "_BucketExchange":
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
        handed, exchange.stats = exchange.stats.num_bytes, SumStats.lossless(norms_sq)
        exchange.stats.num_bytes = handed
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
    ) -> "_BucketExchange":
        """Buckets of tensors like these, filled one by one and handed to the collective in large
        pieces.

        Args:
            counted: Workers here that hand them over, each counted as if it had its own island.
            times: See `Traffic.add`.
            summed: Whether the collective adds up; half-precision buckets are then float32.
        """
        exchange = _BucketExchange(like, self._joined, len(self._workers))
        for sharded, indices in bucket_indices(like):
            dtype = like[indices[0]].dtype
            bucket = pool.bucket(like, indices, sum_dtype(dtype) if summed else dtype)
            views, replica_group = bucket_views(bucket, like, indices), self._replica_group(sharded)
            if replica_group is None:
                # A piece travels while the next is filled.
                exchange.works += [
                    collective(piece) for piece in filled_pieces(bucket, views, fill)
                ]
                mine = bucket
            else:
                for index, view in views:
                    fill(index, view)
                mine = _slice(bucket, replica_group)
                exchange.works.append(collective(mine))
            exchange.stats.num_bytes += self._traffic.add(counted * num_bytes([mine]), times)
            exchange.buckets.append((sharded, indices, bucket.numel(), mine))
        return exchange

    def _sum_of_blocks(
        self, blocks: Tensor, codec: WireFormat, sharded: bool, stats: SumStats
    ) -> Tensor:
        """This rank's slice of the sum; see `BlockSum`."""
        replica_group = self._replica_group(sharded)
        mine = (
            blocks
            if replica_group is None
            else torch.stack([_slice(one, replica_group) for one in blocks])
        )
        stats.num_bytes += self._traffic.add(mine.numel(), crossings(codec, self.num_workers))
        values, total_sq = (
            self._from_owners(mine, codec)
            if codec.sums_in_blocks
            else self._from_everyone(mine, codec)
        )
        stats.total_sq += total_sq
        return values

    def _from_owners(self, blocks: Tensor, codec: WireFormat) -> tuple[Tensor, float]:
        """Each island adds up its share of the rows and sends the sum to the others, in blocks
        again.
        """
        shares = [
            len(part) for part in torch.arange(blocks.shape[1]).tensor_split(len(self._workers))
        ]
        me = dist.get_rank(self._group)
        for_others = [part.reshape(-1) for part in torch.split(blocks, shares, dim=1)]
        own, for_others[me] = for_others[me], blocks.new_empty(0)
        sizes = [
            0 if island == me else workers * shares[me] * codec.block_bytes
            for island, workers in enumerate(self._workers)
        ]
        received = blocks.new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            torch.cat(for_others),
            sizes,
            [part.numel() for part in for_others],
            group=self._group,
        )
        from_islands = list(torch.split(received, sizes))
        from_islands[me] = own
        total = add_decoded(
            torch.cat(from_islands).view(self.num_workers, shares[me], codec.block_bytes), codec
        )
        sums = gathered(codec.encode(total), max(shares), self._group)
        return codec.decode(
            torch.cat([rows[:share] for rows, share in zip(sums, shares, strict=True)])
        ), squared_norm([total])

    def _from_everyone(self, blocks: Tensor, codec: WireFormat) -> tuple[Tensor, float]:
        """Every island gets all workers' blocks and adds them up itself."""
        workers = gathered(blocks, max(self._workers), self._group)
        total = add_decoded(
            torch.cat([some[:count] for some, count in zip(workers, self._workers, strict=True)]),
            codec,
        )
        return total, squared_norm([total]) / len(self._workers)

    def _counts(self, sharded: bool) -> bool:
        replica_group = self._replica_group(sharded)
        return replica_group is None or dist.get_rank(replica_group) == 0

    def _joined(self, mine: Tensor, rows: int, sharded: bool) -> Tensor:
        """The slices of all ranks of the island that hold the same, gathered inside it: (rows,
        ...).
        """
        replica_group = self._replica_group(sharded)
        if replica_group is None:
            return mine
        slices = gathered(mine, _slice_rows(rows, replica_group), replica_group)
        self._traffic.inside += num_bytes([slices[0]])
        return slices.flatten(0, 1)[:rows]


class _BucketExchange:
    """Collectives in flight on buckets."""

    def __init__(self, like: Sequence[Tensor], join: Join, islands: int) -> None:
        self.stats = SumStats([], [], [])
        self.works: list[Any] = []
        self.buckets: list[tuple[bool, list[int], int, Tensor]] = []
        """(sharded, indices, elements, this rank's slice) of each bucket."""
        self._like = like
        self._join = join
        self._islands = islands

    def transfer(self) -> None:
        for work in self.works:
            work.wait()
        if self.stats.sent_sq:
            # Each island has the whole sum; each rank that holds a replica of it counts a slice.
            total_sq = sum(squared_norm([mine]) for _, _, _, mine in self.buckets)
            self.stats.total_sq = total_sq / self._islands

    def result(self) -> list[Tensor]:
        results = list(self._like)
        for sharded, indices, numel, mine in self.buckets:
            for index, view in bucket_views(self._join(mine, numel, sharded), self._like, indices):
                results[index] = with_local(view, like=self._like[index])
        return results


def gathered(mine: Tensor, longest: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """What each rank of the group (None: all ranks) has, padded with zeros to the longest: (ranks,
    longest, ...).
    """
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
    everyone = padded.new_empty(dist.get_world_size(group), *padded.shape)
    dist.all_gather_single(everyone.view(-1), padded.view(-1), group=group)
    return everyone


def _slice(rows: Tensor, replica_group: dist.ProcessGroup) -> Tensor:
    size = _slice_rows(len(rows), replica_group)
    start = size * dist.get_rank(replica_group)
    return rows[start : start + size].clone()


def _slice_rows(rows: int, replica_group: dist.ProcessGroup) -> int:
    return -(-rows // dist.get_world_size(replica_group))
