"""Work on whole matrices that an island has in shards or replicas, each on one rank: its owner.

Muon orthogonalises whole matrices (`algorithms/muon_step.py`). The shards of a matrix go to the
matrix's owner, which computes, and the shards of the result go back. All replicas share the work,
so nothing is computed twice. Matrices are taken in stacks of one shape. While a rank computes a
stack, the next one is on its way to it, and the last one on its way back.
"""

import heapq
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.all_to_all import Pending, start_all_to_all, wait_for
from adloco.distributed.dtensor import local, rows_of_shards
from adloco.distributed.traffic import Traffic, num_bytes

STACK_ELEMENTS = 2**24
"""Most elements of a stack, unless one matrix has more: this bounds the memory of the work."""


class MatrixWork(Protocol):
    """A computation on matrices, each known by its index."""

    matrices: Sequence[Tensor]
    """Tensors with the shapes, and the shards or replicas, of the matrices."""
    dtype: torch.dtype
    """Data type of all that is computed and taken; what is given is converted to it."""

    def given(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """This rank's rows of some matrices, contiguous."""

    def compute(self, stack: Tensor) -> Tensor:
        """Compute the results of whole matrices (number, rows, columns), of the same sizes."""

    def take(self, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Use this rank's rows of the results of some matrices, which are all of one shape."""


class MatrixOwners:
    """The ranks of an island, which share the work on matrices; or one rank."""

    def __init__(
        self,
        traffic: Traffic,
        replicas: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            replicas: The ranks that have the same part of each matrix; None: this one alone.
            shards: The ranks that together have one replica; None: this one alone.
        """
        self.traffic = traffic
        self._replicas = replicas
        self._shards = shards

    @torch.no_grad()
    def do(self, work: MatrixWork) -> None:
        """Do the work. All ranks of the island call it."""
        costs = [cost(matrix) for matrix in work.matrices]
        owned = balanced(costs, _number(self._replicas) * _number(self._shards))
        stacks = [_stacks(work.matrices, indices) for indices in owned]
        # An owner without a stack takes part in the exchanges of the others.
        _overlap(self._turn(work, turn) for turn in zip_longest(*stacks, fillvalue=[]))

    def _turn(self, work: MatrixWork, stacks: Sequence[Sequence[int]]) -> Iterator[None]:
        """Do the work on one stack of each owner; yield while transfers are in flight.

        stacks: Indices of matrices, for each shard of the first replica, then of the next one.
        """
        shards = _number(self._shards)
        empty = local(work.matrices[0]).new_empty(0, dtype=work.dtype)
        of_replicas = [stacks[first : first + shards] for first in range(0, len(stacks), shards)]
        of_shards = of_replicas[_me(self._replicas)]
        mine = of_shards[_me(self._shards)]
        given = [_joined(work.given(stack), empty) if stack else empty for stack in of_shards]
        rows = rows_of_shards(work.matrices[mine[0]]) if mine else [0] * shards
        columns = work.matrices[mine[0]].shape[1] if mine else 0

        sizes = [len(mine) * count * columns for count in rows]
        parts = yield from self._exchange(given, sizes, self._shards)
        results = [empty] * shards
        if mine:
            by_shard = zip(parts, rows, strict=True)
            whole = [part.view(len(mine), count, columns) for part, count in by_shard]
            computed = work.compute(torch.cat(whole, dim=1))
            results = [part.flatten() for part in torch.split(computed, rows, dim=1)]

        sizes = [_elements(work.matrices, stack) for stack in of_shards]
        parts = yield from self._exchange(results, sizes, self._shards)
        ours = _joined(parts, empty)

        sizes = [sum(_elements(work.matrices, stack) for stack in each) for each in of_replicas]
        parts = yield from self._exchange([ours] * len(sizes), sizes, self._replicas)
        for part, owners in zip(parts, of_replicas, strict=True):
            of_stacks = torch.split(part, [_elements(work.matrices, stack) for stack in owners])
            for stack, taken in zip(owners, of_stacks, strict=True):
                if stack:
                    shape = local(work.matrices[stack[0]]).shape
                    work.take(stack, taken.view(len(stack), *shape).unbind())

    def _exchange(
        self, sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None
    ) -> Generator[None, None, list[Tensor]]:
        """Send each rank of a group its tensor; yield once, while the transfers are in flight.

        Args:
            sent: A tensor for each rank, of one dimension.
            sizes: The number of elements that each rank sends to this one.

        Returns:
            What each rank has sent to this one.
        """
        me = _me(group)
        received = [
            sent[me] if rank == me else sent[me].new_empty(size) for rank, size in enumerate(sizes)
        ]
        works: list[Pending] = []
        if group is not None:
            self.traffic.inside += num_bytes([*sent[:me], *sent[me + 1 :]])
            works = start_all_to_all(sent, received, group)
        yield
        wait_for(works)
        return received


def balanced(costs: Sequence[float], owners: int) -> list[list[int]]:
    """Give each of several things to an owner, so that the owners have about equal costs.

    They are given out from the most expensive to the cheapest, each to the owner with the least
    cost so far.

    Returns:
        The indices of each owner's things, in rising order.
    """
    owned: list[list[int]] = [[] for _ in range(owners)]
    loads = [(0.0, owner) for owner in range(owners)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, owner = heapq.heappop(loads)
        owned[owner].append(index)
        heapq.heappush(loads, (load + costs[index], owner))
    return [sorted(indices) for indices in owned]


def cost(matrix: Tensor) -> float:
    """Number of multiplications of a Newton-Schulz step."""
    short, long = sorted(matrix.shape)
    return short * short * (2.0 * long + short)


def _overlap(turns: Iterable[Iterator[None]]) -> None:
    """Run all turns to their ends, each one step ahead of the turn after it."""
    active: list[Iterator[None]] = []
    for turn in turns:
        active = [each for each in (turn, *active) if next(each, "ended") is None]
    while active:
        active = [each for each in active if next(each, "ended") is None]


def _stacks(matrices: Sequence[Tensor], indices: Sequence[int]) -> list[list[int]]:
    """Cut indices of matrices into stacks of one shape, of at most `STACK_ELEMENTS`."""
    stacks = []
    by_shape = sorted(indices, key=lambda index: (tuple(matrices[index].shape), index))
    for shape, group in groupby(by_shape, key=lambda index: matrices[index].shape):
        same, most = list(group), max(1, STACK_ELEMENTS // shape.numel())
        stacks += [same[first : first + most] for first in range(0, len(same), most)]
    return stacks


def _elements(matrices: Sequence[Tensor], indices: Sequence[int]) -> int:
    """Number of elements that this rank has of these matrices."""
    return sum(local(matrices[index]).numel() for index in indices)


def _joined(tensors: Sequence[Tensor], empty: Tensor) -> Tensor:
    """All elements of these tensors one after another, in the data type of `empty`."""
    sizes = [tensor.numel() for tensor in tensors]
    joined = empty.new_empty(sum(sizes))
    # One kernel for all of them, where a GPU would start one for each.
    torch._foreach_copy_(torch.split(joined, sizes), [tensor.flatten() for tensor in tensors])
    return joined


def _number(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group else 1


def _me(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0
