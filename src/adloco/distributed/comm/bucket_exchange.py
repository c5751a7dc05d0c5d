"""Buckets whose sums are in flight, and the slices of them that each rank exchanges.

An island is the group of ranks that serve the same workers. Its ranks that have the same values
each exchange one slice with other islands, and then gather the slices inside the island. So each
byte crosses between islands once.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.comm.buckets import bucket_views, sum_of_squares
from adloco.distributed.comm.comm import SumStats
from adloco.distributed.comm.compressed import Join
from adloco.distributed.comm.ordered_sum import OrderedSum
from adloco.distributed.dtensor import with_local
from adloco.distributed.torch_versions import all_gather_single


class BucketExchange:
    """Sums of buckets in flight."""

    def __init__(self, like: Sequence[Tensor], join: Join, counts: bool) -> None:
        """
        Args:
            like: Tensors with the shapes and shards of the result.
            join: Gathers the slices of a bucket.
            counts: True if this rank counts the norms of its slices. The ranks of one island do.
        """
        self.stats = SumStats([], [], [])
        self.sums: list[OrderedSum] = []
        """One for each piece of a bucket."""
        self.buckets: list[tuple[bool, list[int], int, Tensor]] = []
        """(sharded, indices, elements, this rank's slice of the sum) of each bucket."""
        self._like = like
        self._join = join
        self._counts = counts

    def transfer(self) -> None:
        for piece in self.sums:
            piece.exchange()
        for piece in self.sums:
            piece.add_up()
        for piece in self.sums:
            piece.finish()
        if self.stats.sent_sq and self._counts:
            self.stats.total_sq = sum(sum_of_squares(mine) for _, _, _, mine in self.buckets)

    def result(self) -> list[Tensor]:
        results = list(self._like)
        for sharded, indices, numel, mine in self.buckets:
            for index, view in bucket_views(self._join(mine, numel, sharded), self._like, indices):
                results[index] = with_local(view, like=self._like[index])
        return results


def gathered(mine: Tensor, longest: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather what each rank of the group has, padded with zeros to the longest.

    Args:
        mine: This rank's tensor, (rows, ...).
        longest: The most rows that a rank has.
        group: The ranks; None: all.

    Returns:
        A tensor of shape (ranks, longest, ...).
    """
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
    everyone = padded.new_empty(dist.get_world_size(group), *padded.shape)
    all_gather_single(everyone.view(-1), padded.view(-1), group=group)
    return everyone


def own_slice(rows: Tensor, replica_group: dist.ProcessGroup) -> Tensor:
    """A copy of this rank's slice of rows that all ranks of the replica group have."""
    return rows[slice_of(len(rows), replica_group)].clone()


def slice_of(rows: int, replica_group: dist.ProcessGroup) -> slice:
    """Which of the rows are this rank's."""
    size = slice_rows(rows, replica_group)
    start = size * dist.get_rank(replica_group)
    return slice(start, start + size)


def slice_rows(rows: int, replica_group: dist.ProcessGroup) -> int:
    """The most rows that a rank's slice has."""
    return -(-rows // dist.get_world_size(replica_group))
