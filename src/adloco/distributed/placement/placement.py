"""What a placement does: it knows which workers live in this process and how to reach others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from adloco.distributed.comm.comm import Comm
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.layers import Fill
from adloco.distributed.traffic import Bytes, Traffic

Item = TypeVar("Item")
Result = TypeVar("Result")


class Placement(Protocol):
    """Which workers live in this process, how they run, and how they reach the others.

    Unless stated otherwise, every rank calls every method, in the same order.
    """

    device: torch.device
    """Where the workers of this process compute."""
    num_ranks: int
    """Processes among which the workers are spread."""
    ranks_per_worker: int
    """Ranks of an island: those that serve the same workers together."""
    shards: int
    """Ranks over which a worker's parameters are sharded."""
    traffic: Traffic
    """Bytes that this process has given to collectives."""

    @property
    def rank(self) -> int:
        """Number of this process among `num_ranks`."""
        ...

    @property
    def is_island_first(self) -> bool:
        """True in the process that writes the state of its island's workers."""
        ...

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that writes files and shows progress."""
        ...

    def total_bytes(self) -> Bytes:
        """Bytes that all ranks have given to collectives so far."""
        ...

    def owner(self, worker: int) -> int:
        """Number of the island that hosts the worker. Needs no other rank."""
        ...

    def local(self, worker_ids: Sequence[int]) -> list[int]:
        """The workers among these that live in this process. Needs no other rank."""
        ...

    def engine(self, model: nn.Module, compile: bool = False, fill: Fill | None = None) -> Engine:
        """Put a worker's model on the device of this rank, replicated or sharded over its island.

        Called for each local worker in rising order.

        Args:
            model: The model; FSDP2 shards it in place.
            compile: Compile it with torch.compile.
            fill: Gives values to a model that was built on the meta device.
        """
        ...

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        on_failure: Callable[[], None],
    ) -> list[Result]:
        """Call the function on each local item, concurrently where that helps.

        Args:
            function: What to call.
            items: One item for each local worker.
            on_failure: Called as soon as one item fails or the wait is interrupted, to end the
                others early. The error is raised once all have ended.
        """
        ...

    def comm(self, worker_ids: Sequence[int]) -> Comm:
        """Reductions among these workers, also on ranks that have none of them."""
        ...

    def gather(self, rows: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """Gather a few float64 numbers of every worker.

        They are gathered and not summed, so that every rank adds them in the same order and takes
        the same decisions to the last bit.

        Args:
            rows: The numbers of each local worker, by worker id.

        Returns:
            The numbers of all workers, by worker id in rising order.
        """
        ...

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any rank."""
        ...

    def largest(self, number: float) -> float:
        """The largest of the numbers of all ranks."""
        ...

    def agree(self, value: Item) -> Item:
        """Return rank 0's value on every rank."""
        ...

    def broadcast_model(self, model: nn.Module) -> None:
        """Set the model's parameters and buffers to those of rank 0.

        Used before training starts, and not counted as traffic.
        """
        ...

    def gather_shards(self, state: Item, *, keep: bool = True) -> Item:
        """A copy of a state in host memory in which sharded tensors are whole.

        Called on all ranks of an island, in the same order.

        keep: False on a rank that only helps the others: its copy has empty tensors.
        """
        ...

    def all_values(self, value: Item) -> list[Item]:
        """The values of all ranks, in the order of the ranks; for small ones.

        Used for checkpoints, and not counted as traffic.
        """
        ...

    def transfer(self, state: Item | None, sender: int, receiver: int) -> Item | None:
        """Send a state from one rank to another; only these two call it.

        Args:
            state: What the sender sends; not used on the receiver.
            sender: The rank that has it.
            receiver: The rank that needs it.

        Returns:
            The state, on both.
        """
        ...

    def collect(self, items: Sequence[Item]) -> list[Item]:
        """Collect the items of all ranks on rank 0; other ranks get their own.

        Used for records, and not counted as traffic.
        """
        ...
