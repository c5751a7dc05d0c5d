"""Reductions among workers of one process, or of one island."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import (
    BufferPool,
    PerWorker,
    bucket_indices,
    bucket_views,
    fill_weighted_sum,
    sum_dtype,
    sum_of_squares,
)
from adloco.distributed.comm.comm import CompletedWork, Contributions, ExchangeWork, SumStats, Work
from adloco.distributed.comm.compressed import CompressedSum, Rows, add_decoded, crossings
from adloco.distributed.dtensor import is_sharded, local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import Traffic, num_bytes, ring
from adloco.distributed.wire.wire_format import WireFormat, sums_again


class LocalComm:
    """Reductions among a set of workers that are all local, or none of them."""

    def __init__(
        self,
        num_workers: int,
        traffic: Traffic,
        *,
        transfers: Transfers | None = None,
        pool: BufferPool | None = None,
        counts: Callable[[bool], bool] = lambda sharded: True,
    ) -> None:
        """
        Args:
            num_workers: Local workers of the set.
            traffic: Counts bytes.
            transfers: Runs exchanges in the background; None: in `Work.wait`.
            pool: Memory for buckets; None: a pool of its own.
            counts: Given True for sharded and False for other tensors, says whether this rank
                counts their bytes. One of the ranks that have the same tensors does.
        """
        self.num_workers = num_workers
        self._traffic = traffic
        self._transfers = transfers
        self._pool = pool or BufferPool()
        self._counts = counts

    def mean(
        self, per_worker: PerWorker, weights: Sequence[float], wire: WireFormat | None = None
    ) -> list[Tensor]:
        if wire is None or self.num_workers <= 1 or not per_worker[0]:
            return self._sum(per_worker, weights, None, self._pool).wait()
        given = Contributions(per_worker=per_worker, weights=weights, origin=(), wire=wire)
        return self.pseudo_gradient(given).wait()

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        if given.wire is None or self.num_workers == 1:
            pool = BufferPool() if overlapped else self._pool
            return self._sum(given.per_worker, given.weights, given.origin, pool)
        exchange = CompressedSum(
            given,
            given.wire,
            range(self.num_workers),
            self.num_workers,
            self._counts,
            self._sum_of_blocks,
            lambda rows, count, sharded: rows,
        )
        return ExchangeWork(exchange, self._transfers if overlapped else None)

    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        if receivers and self.num_workers > 1:
            counted = [tensor for tensor in tensors if self._counts(is_sharded(tensor))]
            self._traffic.add(num_bytes(counted), self.num_workers - 1)
        return list(tensors)

    @torch.no_grad()
    def _sum(
        self,
        per_worker: PerWorker,
        weights: Sequence[float],
        origin: Sequence[Tensor] | None,
        pool: BufferPool,
    ) -> CompletedWork:
        assert len(per_worker) == len(weights) == self.num_workers, (
            "one entry and one weight for each worker"
        )
        if not per_worker or not per_worker[0]:
            return CompletedWork([], SumStats.zero(len(weights)))
        sums, sent_bytes = list(per_worker[0]), 0
        norms_sq = torch.zeros(len(weights), dtype=torch.float64, device=local(sums[0]).device)
        total_sq = 0.0
        for sharded, indices in bucket_indices(sums):
            (bucket,) = pool.buckets(sums, indices, sum_dtype(sums[indices[0]].dtype))
            counted = self._counts(sharded)
            for index, view in bucket_views(bucket, sums, indices):
                entries = [local(entry[index]) for entry in per_worker]
                start = local(origin[index]).to(view.device) if origin else None
                measured = norms_sq if origin and counted else None
                fill_weighted_sum(view, entries, weights, start, measured)
                sums[index] = with_local(view, like=sums[index])
            total_sq += sum_of_squares(bucket) if origin and counted else 0.0
            if counted and self.num_workers > 1:
                sent_bytes += num_bytes([bucket]) * len(weights)
        stats = SumStats.lossless(norms_sq)
        stats.total_sq = total_sq
        stats.num_bytes = self._traffic.add(sent_bytes, ring(self.num_workers))
        return CompletedWork(sums, stats)

    def _sum_of_blocks(
        self,
        blocks: Tensor,
        wire: WireFormat,
        rows: Rows,
        sharded: bool,
        kept: bool,
        stats: SumStats,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the sum; see `BlockSum`."""
        total = add_decoded(blocks, wire, rows)
        if self._counts(sharded):
            stats.num_bytes += self._traffic.add(blocks.numel(), crossings(wire, self.num_workers))
            stats.total_sq += squared_norm([total])
        if not sums_again(wire, self.num_workers):
            return total, None
        sent = wire.decode(wire.encode(total))
        return sent, total - sent if kept else None
