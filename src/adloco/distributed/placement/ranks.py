"""The placement of a run over the ranks of torch.distributed.

The ranks are divided into islands. An island hosts a contiguous, balanced share of the workers, and
its ranks shard or replicate each of them. Ranks are numbered island by island, so that an island's
ranks are neighbours (the ranks of one machine, as torchrun numbers them). Within an island they are
numbered replica by replica. All process groups are made here: `comm` is called on all ranks in the
same order, also on those that host none of its workers, and keeps the groups of each set of
islands.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import BufferPool
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.islands import Islands, gathered
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.messages import all_states, broadcast_state, receive_state, send_state
from adloco.distributed.parallel.ddp import ReplicatedModel
from adloco.distributed.parallel.engine import Engine, IslandGroup
from adloco.distributed.parallel.fsdp import ShardedModel
from adloco.distributed.parallel.layers import Fill
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.placement.placement import Item, Result
from adloco.distributed.traffic import Bytes, Traffic, num_bytes

TIMEOUT_SECONDS = 600.0
"""A rank that gives no sign of life for so long has failed."""
PATIENCE = 10
"""How many times timeout_seconds a rank that lives is waited for. One with a large batch can be
minutes late at a sync, and one that reads and tokenises text more so.
"""


def longest_wait(timeout_seconds: float) -> timedelta:
    """Longest wait of a collective for other ranks."""
    return timedelta(seconds=PATIENCE * timeout_seconds)


class Ranks:
    """Workers over the ranks of the default process group; see `Placement`."""

    def __init__(
        self,
        workers: Sequence[int],
        device: torch.device,
        threads: int,
        shards: int = 1,
        replicas: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """
        Args:
            workers: Ids of the run's workers, rising.
            device: Where the workers of this rank compute.
            threads: Workers of a rank that run at once; see `OneProcess`.
            shards: Ranks over which a worker's parameters are sharded.
            replicas: Replicas of each shard; an island has `shards` x `replicas` ranks.
            timeout_seconds: See `longest_wait`.
        """
        self._longest_wait = longest_wait(timeout_seconds)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_workers = len(workers)
        self._places = {worker: place for place, worker in enumerate(workers)}
        self.device = device
        self.shards = shards
        self.ranks_per_worker = shards * replicas
        self.traffic = Traffic()
        self._pool = BufferPool()
        self._transfers = Transfers(device)
        self._num_islands = self.num_ranks // self.ranks_per_worker
        self._island, self._position = divmod(self.rank, self.ranks_per_worker)
        # Workers of one island would mix up their collectives if they ran at once.
        self._process = OneProcess(device, threads if self.ranks_per_worker == 1 else 1)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if self.ranks_per_worker > 1:
            # torch takes meshes of one shape and these names for equal, and its caches of sharded
            # operations outlive a process group: one name is new for each group.
            replica, shard = "replica", f"shard-{time.monotonic_ns()}"
            mesh = init_device_mesh(
                device.type,
                (self._num_islands, replicas, shards),
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
        # Every rank has the same intra-operator threads, however many workers it hosts, because
        # the numbers must not depend on the placement.
        torch.set_num_threads(1)

    @property
    def is_island_first(self) -> bool:
        return self._position == 0

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def owner(self, worker: int) -> int:
        return self._places[worker] * self._num_islands // self.num_workers

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        return [worker for worker in worker_ids if self.owner(worker) == self._island]

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        if self.ranks_per_worker == 1:
            return self._process.engine(model, compile, fill)
        kind = ShardedModel if self.shards > 1 else ReplicatedModel
        return kind(model, self._island_group, compile, fill)

    @torch.no_grad()
    def broadcast_model(self, model: nn.Module) -> None:
        tensors = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, Tensor)
        }
        self._check_same_model(
            {name: f"{tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in tensors.items()}
        )
        for tensor in tensors.values():
            sent = tensor.to(self.device).contiguous()
            dist.broadcast(sent, 0)
            tensor.copy_(sent)

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        islands = tuple(sorted({self.owner(worker) for worker in worker_ids}))
        if len(islands) > 1 and islands not in self._groups:
            # One group for each position on an island: its ranks have the same part of the model.
            places = [
                [island * self.ranks_per_worker + place for island in islands]
                for place in range(self.ranks_per_worker)
            ]
            self._groups[islands] = self._new_group(places)
        return Comm(
            Islands(
                workers=[
                    sum(self.owner(worker) == island for worker in worker_ids) for island in islands
                ],
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
        assert list(rows) == self.local([*self._places]), "one row for each local worker"
        most = -(-self.num_workers // self._num_islands)
        mine = torch.tensor(
            [list(row) for row in rows.values()], dtype=torch.float64, device=self.device
        )
        everyone = gathered(mine, most)
        if self.num_workers > 1 and self._position == 0:
            self.traffic.add(num_bytes([mine]), self.num_workers - 1)
        parts = iter(everyone[:: self.ranks_per_worker].tolist())
        islands = [
            [worker for worker in self._places if self.owner(worker) == island]
            for island in range(self._num_islands)
        ]
        return {
            worker: row
            for workers, part in zip(islands, parts, strict=True)
            for worker, row in zip(workers, part, strict=False)
        }

    def any(self, flag: bool) -> bool:
        return self.largest(float(flag)) > 0

    def largest(self, number: float) -> float:
        most = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def total_bytes(self) -> Bytes:
        return Bytes(*self._total(self.traffic.total()))

    def collect(self, items: Sequence[Item]) -> list[Item]:
        # Ranks send one after another, so that rank 0 holds the message of one at a time.
        collected = list(items)
        if self.is_rank_zero:
            for rank in range(self.ranks_per_worker, self.num_ranks, self.ranks_per_worker):
                collected += receive_state(rank)
        elif self.is_island_first:
            send_state(collected, 0)
        return collected

    def gather_shards(self, state: Item, *, keep: bool = True) -> Item:
        gathered: Item = gather_shards(state, keep=keep)
        return gathered

    def all_values(self, value: Item) -> list[Item]:
        return all_states(value)

    def transfer(self, state: Item | None, sender: int, receiver: int) -> Item | None:
        if self.rank == sender:
            send_state(state, receiver)
            return state
        received: Item = receive_state(sender)
        return received

    def agree(self, value: Item) -> Item:
        return broadcast_state(value)

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_failure: Callable[[], None],
    ) -> list[Result]:
        if self.ranks_per_worker > 1:
            # One after another in this thread: after a failure no other worker may start, because
            # its collectives would meet those of the failed worker on the other ranks.
            return [function(item) for item in items]
        return self._process.map(function, items, on_failure)

    def _check_same_model(self, mine: Mapping[str, str]) -> None:
        """Raise ValueError on all ranks if one has other tensors than rank 0.

        mine: Shape and type of each tensor on this rank, by name.
        """
        first = broadcast_state(mine)
        differing = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
        found = -int(self.largest(-self.rank if differing else -self.num_ranks))
        if found == self.num_ranks:
            return
        name = differing[0] if differing else ""
        raise ValueError(
            broadcast_state(
                "build_model must make the same model on every rank, but "
                f"{name} is {first.get(name, 'absent')} on rank 0 and {mine.get(name, 'absent')} "
                f"on rank {self.rank}",
                found,
            )
        )

    def _replica_group(self, sharded: bool) -> dist.ProcessGroup | None:
        """The ranks of this island that have the same values as this one; None if it is alone.

        sharded: True for sharded tensors, False for whole ones.
        """
        alone = self.ranks_per_worker == (self.shards if sharded else 1)
        return None if alone else self._replicas if sharded else self._inside

    def _rank_of(self, worker: int) -> int:
        """The rank that has this rank's position on the worker's island."""
        return self.owner(worker) * self.ranks_per_worker + self._position

    def _new_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make all these groups, on all ranks; return the one of this rank, or else the first."""
        made = [dist.new_group(list(ranks), timeout=self._longest_wait) for ranks in groups]
        mine: dist.ProcessGroup = next(
            (group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks),
            made[0],
        )
        return mine

    def _total(self, numbers: Sequence[float]) -> list[float]:
        """Add up each number over all ranks, in float64."""
        total = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(number) for number in total.tolist()]
