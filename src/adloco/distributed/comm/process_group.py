"""Reductions among workers that live on several islands. Each byte crosses between islands once: ranks that hold the same take a slice each.

Tensors as they are are all-reduced. In a wire format, each island owns a share of the blocks: it gets that share from all workers, adds it up in
float32, encodes the sum and sends it to all, so that what crosses is compressed both ways, and every island decodes the same bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.buckets import PerWorker, Scratch, Squares, fill_weighted_sum, filled_pieces, kinds, parts
from adloco.distributed.comm.compressed import CompressedSum, Contributions, Join, add_decoded
from adloco.distributed.comm.local import Finished, Sum, crossings
from adloco.distributed.dtensor import is_sharded, local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.distributed.traffic import Traffic, num_bytes, ring


class GroupComm:
    """A set of workers on several islands, of which this one may host some."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        holders: Callable[[bool], dist.ProcessGroup | None],
        workers: Sequence[int],
        member: bool,
        rank_of: Callable[[int], int],
        traffic: Traffic,
        scratch: Scratch,
    ) -> None:
        """group: the ranks at this place on each island. workers: how many each hosts. member: if this is one. holders, rank_of: see `Ranks`."""
        self.num_workers = sum(workers)
        self._group = group
        self._holders = holders
        self._workers = workers
        self._member = member
        self._rank_of = rank_of
        self._traffic = traffic
        self._scratch = scratch

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        if not self._member or not per_worker[0]:
            return []
        return self._sent(
            per_worker[0],
            lambda index, part: fill_weighted_sum(part, [local(entry[index]) for entry in per_worker], weights, None),
            self._all_reduce,
            self._scratch,
            counted=len(per_worker),
            times=ring(self.num_workers),
        ).finished()

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Sum:
        if not self._member or not given.per_worker[0]:
            return Finished([], Squares.zero(len(given.weights)))
        if given.wire is None:
            return self._differences(given, Scratch() if overlapped else self._scratch)
        return CompressedSum(given, given.wire, self._counts, self._sum_of_blocks, self._joined)

    def broadcast(self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]) -> list[Tensor]:
        if not self._member or not receivers or not tensors:
            return list(tensors)
        rank = self._rank_of(source)
        return self._sent(
            tensors,
            lambda index, part: part.copy_(local(tensors[index])),
            lambda flat: dist.broadcast(flat, rank, group=self._group, async_op=True),
            self._scratch,
            counted=int(dist.get_rank() == rank),
            times=self.num_workers - 1,
        ).finished()

    def _differences(self, given: Contributions, scratch: Scratch) -> "_FlatSum":
        first = given.per_worker[0]
        squares = torch.zeros(len(given.weights), dtype=torch.float64, device=local(first[0]).device)

        def fill(index: int, part: Tensor) -> None:
            entries = [local(entry[index]) for entry in given.per_worker]
            counted = squares if self._counts(is_sharded(first[index])) else None
            fill_weighted_sum(part, entries, given.weights, local(given.origin[index]).to(part.device), counted)

        total = self._sent(first, fill, self._all_reduce, scratch, counted=len(given.weights), times=ring(self.num_workers))
        total.squares = Squares.exact(squares)
        return total

    def _all_reduce(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self._group, async_op=True)

    @torch.no_grad()
    def _sent(
        self,
        like: Sequence[Tensor],
        fill: Callable[[int, Tensor], Any],
        collective: Callable[[Tensor], Any],
        scratch: Scratch,
        *,
        counted: int,
        times: float,
    ) -> "_FlatSum":
        """Tensors like these, filled one by one and handed to the collective in large pieces, each kind of them apart.

        counted: workers here that hand them over, each counted as if it had an island of its own. times: see `Traffic.add`.
        """
        total = _FlatSum(like, self._joined, len(self._workers))
        for sharded, indices in kinds(like):
            flat = scratch.flat(like, indices)
            views, holders = parts(flat, like, indices), self._holders(sharded)
            if holders is None:
                # A piece travels while the next is filled.
                total.works += [collective(piece) for piece in filled_pieces(flat, views, fill)]
                mine = flat
            else:
                for index, part in views:
                    fill(index, part)
                mine = _slice(flat, holders)
                total.works.append(collective(mine))
            self._traffic.add(counted * num_bytes([mine]), times)
            total.flats.append((sharded, indices, flat.numel(), mine))
        return total

    def _sum_of_blocks(self, blocks: Tensor, wire: WireFormat, sharded: bool) -> tuple[Tensor, float]:
        """This rank's slice of the sum; see `BlockSum`."""
        holders = self._holders(sharded)
        mine = blocks if holders is None else torch.stack([_slice(one, holders) for one in blocks])
        self._traffic.add(mine.numel(), crossings(wire, self.num_workers))
        return self._from_owners(mine, wire) if wire.sums_in_blocks else self._from_everyone(mine, wire)

    def _from_owners(self, blocks: Tensor, wire: WireFormat) -> tuple[Tensor, float]:
        """Each island adds up its share of the rows and sends the sum to the others, in blocks again."""
        shares = [len(part) for part in torch.arange(blocks.shape[1]).tensor_split(len(self._workers))]
        me = dist.get_rank(self._group)
        for_others = [part.reshape(-1) for part in torch.split(blocks, shares, dim=1)]
        own, for_others[me] = for_others[me], blocks.new_empty(0)
        sizes = [0 if island == me else workers * shares[me] * wire.block_bytes for island, workers in enumerate(self._workers)]
        received = blocks.new_empty(sum(sizes))
        dist.all_to_all_single(received, torch.cat(for_others), sizes, [part.numel() for part in for_others], group=self._group)
        from_islands = list(torch.split(received, sizes))
        from_islands[me] = own
        total = add_decoded(torch.cat(from_islands).view(self.num_workers, shares[me], wire.block_bytes), wire)
        sums = gathered(wire.encode(total), max(shares), self._group)
        return wire.decode(torch.cat([rows[:share] for rows, share in zip(sums, shares, strict=True)])), squared_norm([total])

    def _from_everyone(self, blocks: Tensor, wire: WireFormat) -> tuple[Tensor, float]:
        """Every island gets all workers' blocks and adds them up itself."""
        workers = gathered(blocks, max(self._workers), self._group)
        total = add_decoded(torch.cat([some[:count] for some, count in zip(workers, self._workers, strict=True)]), wire)
        return total, squared_norm([total]) / len(self._workers)

    def _counts(self, sharded: bool) -> bool:
        holders = self._holders(sharded)
        return holders is None or dist.get_rank(holders) == 0

    def _joined(self, mine: Tensor, rows: int, sharded: bool) -> Tensor:
        """The slices of all ranks of the island that hold the same, gathered inside it: (rows, ...)."""
        holders = self._holders(sharded)
        if holders is None:
            return mine
        slices = gathered(mine, _slice_rows(rows, holders), holders)
        self._traffic.inside += num_bytes([slices[0]])
        return slices.flatten(0, 1)[:rows]


class _FlatSum:
    """Collectives under way on flat tensors."""

    def __init__(self, like: Sequence[Tensor], join: Join, islands: int) -> None:
        self.squares = Squares([], [], [])
        self.works: list[Any] = []
        self.flats: list[tuple[bool, list[int], int, Tensor]] = []
        self._like = like
        self._join = join
        self._islands = islands

    def transfer(self) -> None:
        for work in self.works:
            work.wait()
        if self.squares.sent:
            # Each island has the whole sum, of which each rank of those that hold the same counts a slice.
            self.squares.total = sum(squared_norm([mine]) for _, _, _, mine in self.flats) / self._islands

    def result(self) -> list[Tensor]:
        results = list(self._like)
        for sharded, indices, numel, mine in self.flats:
            for index, part in parts(self._join(mine, numel, sharded), self._like, indices):
                results[index] = with_local(part, like=self._like[index])
        return results

    def finished(self) -> list[Tensor]:
        self.transfer()
        return self.result()


def gathered(mine: Tensor, longest: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """What each rank of the group (None: all ranks) has, padded with zeros to the longest: (ranks, longest, ...)."""
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine), *mine.shape[1:])])
    everyone = padded.new_empty(dist.get_world_size(group), *padded.shape)
    dist.all_gather_single(everyone.view(-1), padded.view(-1), group=group)
    return everyone


def _slice(rows: Tensor, holders: dist.ProcessGroup) -> Tensor:
    size = _slice_rows(len(rows), holders)
    start = size * dist.get_rank(holders)
    return rows[start : start + size].clone()


def _slice_rows(rows: int, holders: dist.ProcessGroup) -> int:
    return -(-rows // dist.get_world_size(holders))
