"""Places the workers of a run: all in this process, or spread over ranks.

The ranks are divided into islands. An island hosts a contiguous, balanced share of the workers, and
its ranks shard or replicate each of them. Ranks are numbered island by island, so that an island's
ranks are neighbours (the ranks of one machine, as torchrun numbers them). Within an island they are
numbered replica by replica. All process groups are made here: `comm` is called on all ranks in the
same order, also on those that host none of its workers, and keeps the groups of each set of
islands.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import BufferPool
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands, gathered
from adloco.distributed.device import STREAMS
from adloco.distributed.messages import (
    all_states,
    as_bytes,
    broadcast_state,
    message_device,
    receive_state,
    send_state,
)
from adloco.distributed.parallel.engine import Engine, IslandGroup
from adloco.distributed.parallel.fsdp import ShardedModel
from adloco.distributed.parallel.layers import Fill, require_bare, written_tensors
from adloco.distributed.parallel.whole_model import WholeModel
from adloco.distributed.placement.islands import island_of
from adloco.distributed.placement.threads import (
    Item,
    Result,
    map_in_threads,
    num_cores,
    set_up_arithmetic,
)
from adloco.distributed.traffic import Bytes, Traffic

TIMEOUT_SECONDS = 600.0
"""Lateness of a rank that is allowed by default; see `longest_wait`."""
PATIENCE = 10
"""Factor on timeout_seconds for which a living rank is waited for. One with a large batch can be
minutes late at a sync, and one that reads and tokenises text more so.
"""


def longest_wait(timeout_seconds: float) -> timedelta:
    """Longest wait of a collective for other ranks."""
    return timedelta(seconds=PATIENCE * timeout_seconds)


class Placement:
    """Places workers, runs those of this process, and connects them with the others.

    Unless stated otherwise, every rank calls every method, in the same order.
    """

    def __init__(
        self,
        workers: Sequence[int] | None,
        device: str | torch.device = "cpu",
        threads: int = 0,
        shards: int = 1,
        replicas: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
        ranks_of_device: int = 1,
    ) -> None:
        """
        Args:
            workers: Ids of the run's workers, rising, for the ranks of the default process group;
                None: all workers live in this process, which talks to no other.
            threads: Workers of this process that run at once. 0: one per core on a CPU; on a GPU
                one at a time, or one per core if they are small.
            replicas: Replicas of each shard; an island has `shards` x `replicas` ranks.
            timeout_seconds: See `longest_wait`.
        """
        set_up_arithmetic()
        self.device = torch.device(device)
        """Device of this process's workers."""
        self.ranks_of_device = ranks_of_device
        """Ranks that share this process's GPU; 1 on a CPU."""
        self.shards = shards
        """Ranks over which a worker's parameters are sharded."""
        self.ranks_per_worker = shards * replicas
        """Ranks of an island: those that serve the same workers together."""
        self.rank, self.num_ranks = 0, 1
        """Number of this process, and of the processes among which the workers are spread."""
        self.traffic = Traffic()
        """Bytes that this process has given to collectives."""
        self._alone = workers is None
        self._places = {worker: place for place, worker in enumerate(workers or ())}
        self._pool = BufferPool()
        self._transfers = Transfers(self.device)
        self._threads = threads
        self._longest_wait = longest_wait(timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._island_group: IslandGroup | None = None
        if not self._alone:
            self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
            # Every rank has the same intra-operator threads, however many workers it hosts, because
            # the numbers must not depend on the placement.
            torch.set_num_threads(1)
        self._num_islands = self.num_ranks // self.ranks_per_worker
        self._island, self._position = divmod(self.rank, self.ranks_per_worker)
        if self.ranks_per_worker > 1:
            self._make_island_groups(replicas)

    @property
    def workers(self) -> list[int] | None:
        """Ids of the run's workers; None in one process, which hosts all that it is given."""
        return None if self._alone else [*self._places]

    @property
    def is_island_first(self) -> bool:
        """True in the process that writes the state of its island's workers."""
        return self._position == 0

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that writes files and shows progress."""
        return self.rank == 0

    def owner(self, worker: int) -> int:
        """Number of the island that hosts the worker. Needs no other rank."""
        if self._alone:
            return 0
        return island_of(self._places[worker], len(self._places), self._num_islands)

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        """The workers among these that live in this process. Needs no other rank."""
        return [worker for worker in worker_ids if self.owner(worker) == self._island]

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        """Put a worker's model on the device of this rank, replicated over its island,
        or sharded in place.

        Called for each local worker in rising order.

        fill: Gives values to a model that was built on the meta device.

        Raises:
            ValueError: The model is wrapped or sharded already.
        """
        require_bare(model)
        if self.shards > 1:
            assert self._island_group is not None
            return ShardedModel(model, self._island_group, compile, fill)
        return WholeModel(model, self.device, self._island_group, compile, fill)

    def sum_on_island(self, numbers: Sequence[float]) -> Sequence[float]:
        """Add up each number over the ranks of this island: the same bits on all of them."""
        return self._island_group.sum(numbers) if self._island_group else numbers

    def average_on_island(self, buffers: Iterable[Tensor]) -> None:
        """Set tensors to their mean over the ranks of this island."""
        if self._island_group:
            self._island_group.average(buffers)

    def mean_of_copies(self, own: Tensor, *, sharded: bool) -> Tensor:
        """The mean of a tensor over the ranks of this island that have copies of this rank's
        sharded (True) or whole (False) tensors.
        """
        group = self._replica_group(sharded)
        if group is None:
            return own
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_failure: Callable[[], None] = lambda: None,
        together: bool = False,
        apart: bool = False,
    ) -> list[Result]:
        """Call the function on each local item, concurrently where that helps.

        Args:
            on_failure: Called as soon as one item fails or the wait is interrupted, to end the
                others early. The error is raised once all have ended.
            together: True if several items at once use a GPU better than one after another.
            apart: True if one must have ended before another begins.
        """
        if self.ranks_per_worker > 1:
            # One after another in this thread: workers of one island would mix up their collectives
            # if they ran at once, and after a failure no other worker may start, because its
            # collectives would meet those of the failed worker on the other ranks.
            return [function(item) for item in items]
        # What is compiled on a GPU would be compiled again in this thread, which has another number
        # of intra-operator threads.
        if len(items) == 1 and not (apart and self.device.type == "cuda"):
            return [function(items[0])]
        at_once = self._threads or (num_cores() if together or self.device.type == "cpu" else 1)
        if self.device.type == "cuda" and len(items) >= STREAMS:
            at_once = 1  # Some have the same stream, and transfers have one of them, too.
        return map_in_threads(function, items, on_failure, 1 if apart else at_once, self.device)

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        """Reductions among these workers, also on ranks that have none of them."""
        counts = Counter(map(self.owner, worker_ids))
        islands = tuple(sorted(counts))
        if len(islands) > 1 and islands not in self._groups:
            # One group for each position on an island: its ranks have the same part of the model.
            places = [
                [island * self.ranks_per_worker + place for island in islands]
                for place in range(self.ranks_per_worker)
            ]
            self._groups[islands] = self._new_group(places, "gloo")
        return Comm(
            Islands(
                workers=[counts[island] for island in islands],
                traffic=self.traffic,
                me=islands.index(self._island) if self._island in islands else None,
                group=self._groups.get(islands),
                same=self._replica_group,
                rank_of=self._rank_of,
            ),
            transfers=self._transfers,
            pool=self._pool,
        )

    def gather(self, rows: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """Gather a few float64 numbers of every worker, from those of each local one: by worker id
        in rising order.

        They are gathered and not summed, so that every rank adds them in the same order and takes
        the same decisions to the last bit.
        """
        num_workers = len(rows) if self._alone else len(self._places)
        if num_workers > 1 and self._position == 0:
            self.traffic.add(sum(8 * len(row) for row in rows.values()), num_workers - 1)
        if self._alone:
            return {worker: list(rows[worker]) for worker in sorted(rows)}
        assert list(rows) == self.local([*self._places]), "one row for each local worker"
        mine = torch.tensor(
            [list(row) for row in rows.values()], dtype=torch.float64, device=message_device()
        )
        everyone = gathered(mine, -(-num_workers // self._num_islands))
        # Each island's rows are in the order of its workers.
        of_islands = [iter(part) for part in everyone[:: self.ranks_per_worker].tolist()]
        return {worker: next(of_islands[self.owner(worker)]) for worker in self._places}

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any rank."""
        return self.largest(float(flag)) > 0

    def largest(self, number: float) -> float:
        """The largest of the numbers of all ranks."""
        return self._reduced([number], dist.ReduceOp.MAX)[0]

    def total(self, number: float) -> float:
        """The sum of the numbers of all ranks."""
        return self._reduced([number], dist.ReduceOp.SUM)[0]

    def total_bytes(self) -> Bytes:
        """Bytes that all ranks have given to collectives so far; call it on all ranks."""
        return Bytes(*self._reduced(self.traffic.total(), dist.ReduceOp.SUM))

    def _reduced(
        self, numbers: Sequence[float], operation: dist.ReduceOp.RedOpType
    ) -> Sequence[float]:
        if self._alone:
            return numbers
        result = torch.tensor(numbers, dtype=torch.float64, device=message_device())
        dist.all_reduce(result, operation)
        return result.tolist()

    def agree(self, value: Item) -> Item:
        """Return rank 0's value on every rank."""
        return value if self._alone else broadcast_state(value)

    @torch.no_grad()
    def broadcast_model(self, model: nn.Module) -> None:
        """Set the model's parameters and buffers, those outside of its state too, to those of
        rank 0, which has the same ones.

        Used before training starts, and not counted as traffic.
        """
        if self._alone:
            return
        for tensor in written_tensors(model).values():
            sent = tensor.to(message_device()).contiguous()
            dist.broadcast(as_bytes(sent), 0)  # gloo does not know every type.
            tensor.copy_(sent)

    def all_values(self, value: Item) -> list[Item]:
        """The values of all ranks, in the order of the ranks; for small ones.

        Used for checkpoints, and not counted as traffic.
        """
        return [value] if self._alone else all_states(value)

    def transfer(self, state: Item | None, sender: int, receiver: int) -> Item | None:
        """Send a state from one rank to another, and return it on both; only these two call it.

        state: What the sender sends; not used on the receiver.
        """
        if sender == receiver:
            return state
        if self.rank == sender:
            send_state(state, receiver)
        else:
            state = receive_state(sender)
        return state

    def collect(self, items: Sequence[Item]) -> list[Item]:
        """Collect the items of the first ranks of all islands on rank 0; other ranks get their own.

        Used for the parts of a state, and not counted as traffic.
        """
        # Ranks send one after another, so that rank 0 holds the message of one at a time.
        collected = list(items)
        if self.is_rank_zero:
            for rank in range(self.ranks_per_worker, self.num_ranks, self.ranks_per_worker):
                collected += receive_state(rank)
        elif self.is_island_first:
            send_state(collected, 0)
        return collected

    def _make_island_groups(self, replicas: int) -> None:
        # torch takes meshes of one shape and these names for equal, and its caches of sharded
        # operations outlive a process group: one name is new for each group.
        replica, shard = "replica", f"shard-{time.monotonic_ns()}"
        mesh = init_device_mesh(
            self.device.type,
            (self._num_islands, replicas, self.shards),
            mesh_dim_names=("worker", replica, shard),
        )
        self._inside = self._new_group(
            [
                range(first, first + self.ranks_per_worker)
                for first in range(0, self.num_ranks, self.ranks_per_worker)
            ]
        )
        self._replicas = mesh[replica].get_group()
        self._island_group = IslandGroup(mesh[replica, shard], self._inside, self.traffic)

    def _replica_group(self, sharded: bool) -> dist.ProcessGroup | None:
        """The ranks of this island that have the same values as this one; None if it is alone.

        sharded: True for sharded tensors, False for whole ones.
        """
        alone = self.ranks_per_worker == (self.shards if sharded else 1)
        return None if alone else self._replicas if sharded else self._inside

    def _rank_of(self, worker: int) -> int:
        """The rank that has this rank's position on the worker's island."""
        return self.owner(worker) * self.ranks_per_worker + self._position

    def _new_group(
        self, groups: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup:
        """Make all these groups, on all ranks; return the one of this rank, or else the first."""
        made = [
            dist.new_group(list(ranks), timeout=self._longest_wait, backend=backend)
            for ranks in groups
        ]
        mine = (group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks)
        return cast(dist.ProcessGroup, next(mine, made[0]))


class OneProcess(Placement):
    """All workers in this process."""

    def __init__(self, device: str | torch.device = "cpu", threads: int = 0) -> None:
        super().__init__(None, device, threads)
