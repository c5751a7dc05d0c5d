"""Sums and broadcasts among a fixed set of workers, on one island or on several.

Each rank gives one entry for each worker that lives there, and callers cannot tell how many ranks
take part: a sum has the same bits on any placement (in a wire format with blocks, if shards are
whole blocks).
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.all_to_all import broadcast
from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import (
    BufferPool,
    Contributions,
    PerWorker,
    bucket_indices,
    bucket_views,
)
from adloco.distributed.comm.compressed import CompressedSum
from adloco.distributed.comm.plain_sum import PlainSum
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.dtensor import local, with_local
from adloco.distributed.traffic import num_bytes
from adloco.distributed.wire.wire_format import WireFormat, to_bytes


class Work:
    """A sum that has been started; what is left of its exchange runs in the background, or in
    `wait`.
    """

    def __init__(
        self, exchange: PlainSum | CompressedSum, transfers: Transfers | None, filled_seconds: float
    ) -> None:
        """
        exchange: A sum that has been filled: `transfer` sends and receives, in any thread, and
            `result` comes after it.
        """
        self.stats = exchange.stats
        """Complete after `wait`."""
        self._exchange = exchange
        self._filled_seconds = filled_seconds
        self._transfer = transfers.start(exchange.transfer) if transfers else None

    def wait(self) -> list[Tensor]:
        """Return the sum, the same bits on all islands. May be called once."""
        began = time.monotonic()
        if self._transfer:
            self.stats.transfer_seconds = self._transfer.result()
        else:
            self._exchange.transfer()
        result = self._exchange.result()
        waited = time.monotonic() - began
        if self._transfer:
            self.stats.hidden_seconds = max(0.0, self.stats.transfer_seconds - waited)
        else:
            self.stats.transfer_seconds = self._filled_seconds + waited
        return result


class Comm:
    """Reductions among a fixed set of workers.

    Every worker of the set takes part in every call, in the same order. Results are views of memory
    that the next reduction overwrites, so copy what must be kept. Sums of half-precision tensors
    are computed, exchanged and returned in float32.
    """

    def __init__(
        self,
        islands: Islands,
        *,
        transfers: Transfers | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """
        Args:
            transfers: Runs exchanges in the background; None: some of its own.
            pool: Memory for buckets; None: a pool of its own.
        """
        self.num_workers = islands.num_workers
        self._islands = islands
        self._transfers = transfers or Transfers(torch.device("cpu"))
        self._pool = pool or BufferPool()

    def mean(
        self, per_worker: PerWorker, weights: Sequence[float], wire: WireFormat | None = None
    ) -> list[Tensor]:
        """The weighted mean of all workers' entries, the same bits on all islands.

        Args:
            weights: One number for each local worker; over the whole set they add up to 1.
            wire: The wire format; None: uncompressed.

        Returns:
            One tensor for each tensor of a worker, float32 or more precise. Empty on ranks without
            a worker of the set.
        """
        if self._islands.me is None:
            return []
        given = Contributions(per_worker=per_worker, weights=weights, origin=(), wire=wire)
        return self.start_mean(given).wait()

    def start_mean(self, given: Contributions, *, overlapped: bool = False) -> Work:
        """Start the weighted mean of origin - entry, or of entries if there is no origin.

        The workers' entries have been read when this returns.

        overlapped: Exchange in the background, in memory of its own, so that training and
            other reductions may come before `wait`.
        """
        began, islands = time.monotonic(), self._islands
        transfers = self._transfers if overlapped else None
        if not overlapped:
            self._transfers.finish()
        exchange: PlainSum | CompressedSum
        if given.wire is not None and self.num_workers > 1:
            exchange = CompressedSum(given, given.wire, islands)
        else:
            pool = BufferPool() if overlapped else self._pool
            exchange = PlainSum(given, islands, pool, overlapped=overlapped)
            transfers = transfers if islands.group else None  # One island has nothing to send.
        return Work(exchange, transfers, time.monotonic() - began)

    @torch.no_grad()
    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        """Send the tensors of worker `source` to the workers in `receivers`, and return them, in
        their own type.

        Nothing is sent if there are no receivers.
        """
        islands, results = self._islands, list(tensors)
        if islands.me is None or not receivers or self.num_workers == 1:
            return results
        self._transfers.finish()
        sent_bytes = 0
        for sharded, indices in bucket_indices(tensors):
            if islands.group is None:
                own = [tensors[index] for index in indices]
                sent_bytes += num_bytes(own) if islands.counts(sharded) else 0
                continue
            (bucket,) = self._pool.buckets(tensors, indices, tensors[indices[0]].dtype)
            for index, view in bucket_views(bucket, tensors, indices):
                view.copy_(local(tensors[index]))
            (mine,) = islands.slices(bucket[None], sharded)
            mine = to_bytes(mine[:, None])  # gloo does not know every type, such as float8.
            rank = islands.rank_of(source)
            broadcast(mine, rank, islands.group)
            sent_bytes += num_bytes([mine]) if dist.get_rank() == rank else 0
            received = islands.joined(mine, len(bucket), sharded).view(bucket.dtype).flatten()
            for index, view in bucket_views(received, tensors, indices):
                results[index] = with_local(view, like=tensors[index])
        islands.traffic.add(sent_bytes, self.num_workers - 1)
        return results
