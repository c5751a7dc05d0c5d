"""Which processes train together, and what is written about it at the store.

A *quorum* is a set of processes that form one process group, in the order of their ranks. A process
has an id: its rank at the start, or the next free number if it was started later. `meeting.py` says
how the processes find the next quorum.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.restarts import CONNECT_SECONDS, of_this_start

OVER = "over"
"""The key that is set when a run has ended."""


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The processes that train together until one is lost or joins."""

    number: int
    """How many quorums the run had before, since its processes were started."""
    members: tuple[int, ...]
    """Ids of the processes, in the order of their ranks."""
    process: int
    """Id of this process."""
    shape: tuple[int, int] | None = None
    """Shards and replicas of an island; None: the recipe says."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.members.index(self.process)

    def keys(self, store: Any) -> Any:
        """The store with keys that belong to this quorum."""
        return quorum_keys(store, self.number)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is written at the store about a quorum."""

    members: list[int]
    lost: list[int]
    """Ids of the members before that gave no sign of life."""
    shape: list[int]
    """Shards and replicas of an island."""


def quorum_keys(store: Any, number: int) -> Any:
    """The store with keys that belong to the quorum of this number."""
    return dist.PrefixStore(f"quorum-{number}", store)  # type: ignore[attr-defined]


def connect() -> Any:
    """A new connection to the store at which torchrun (or `start_ranks`) let the ranks meet."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return of_this_start(store)


def started_later() -> bool:
    """True if a launcher has started this process to take the place of a lost one."""
    return int(os.environ.get("RANK", "0")) >= int(os.environ.get("WORLD_SIZE", "1"))


def report_death(store: Any, process: int, how: str) -> None:
    """Tell all that a process has ended, which it could not do itself.

    Args:
        store: The store of the launcher that started it.
        process: Its id.
        how: How it ended: the rest of a sentence about it.
    """
    _note_death(of_this_start(store), process, how)


def report_end(store: Any, process: int, code: int) -> None:
    """Tell the launchers of other machines that a process has ended, and its exit code."""
    of_this_start(store).set(f"ended-{process}", str(code))


def all_have_ended(store: Any, processes: Iterable[int]) -> bool:
    """True if the launchers of all these processes say that they have ended."""
    return bool(of_this_start(store).check([f"ended-{process}" for process in processes]))


def end_codes(store: Any, processes: Iterable[int]) -> list[int]:
    """The exit codes of processes that have all ended."""
    return [int(of_this_start(store).get(f"ended-{process}")) for process in processes]


def report_start(store: Any, process: int, launcher: int) -> None:
    """Tell all which launcher ends a process if it is taken for lost."""
    of_this_start(store).set(f"launcher-of-{process}", str(launcher))


def beat_as_launcher(store: Any, launcher: int) -> None:
    """Give a sign of life of a launcher."""
    of_this_start(store).add(f"launcher-beats-{launcher}", 1)


def beats_of_launcher(store: Any, process: int) -> int:
    """How many signs of life the launcher has given that ends this process if it is taken for lost;
    0: there is none.
    """
    key = f"launcher-of-{process}"
    return store.add(f"launcher-beats-{int(store.get(key))}", 0) if store.check([key]) else 0


def _note_death(keys: Any, process: int, how: str) -> None:
    keys.set(f"dead-{process}", how)
    keys.add("deaths", 1)


def later_quorums(store: Any, number: int) -> list[Decision]:
    """What was decided after quorum `number`; called by a launcher."""
    keys = of_this_start(store)
    return [
        read_decision(keys, later) for later in range(number + 1, newest_number(keys, number) + 1)
    ]


def lost_islands(before: Quorum, after: Quorum, size: int) -> list[int]:
    """The islands of a quorum, by number from 0, of which a rank is not in the next one.

    size: Ranks of an island.
    """
    islands = islands_of(before.members, size)
    return [number for number, ranks in enumerate(islands) if not {*ranks} <= {*after.members}]


def islands_of(members: Sequence[int], size: int) -> list[list[int]]:
    """Neighbours by islands of this many ranks; the last one may have fewer."""
    return [list(members[first : first + size]) for first in range(0, len(members), size)]


def end_all(quorum: Quorum) -> None:
    """Tell processes that wait to join that the run has ended; called by its members."""
    if quorum.number > 0:
        connect().set(OVER, "")


def leave(quorum: Quorum) -> None:
    """Tell the others that this process ends, and that they go on."""
    _note_death(connect(), quorum.process, "was told to leave")


def newest_number(store: Any, number: int) -> int:
    """The number of the newest quorum, if that of an earlier one is `number`."""
    while store.check([f"quorum-{number + 1}"]):
        number += 1
    return number


def decided(store: Any, number: int, process: int) -> Quorum:
    decision = read_decision(store, number)
    shards, replicas = decision.shape
    members = tuple(decision.members)
    return Quorum(number=number, members=members, process=process, shape=(shards, replicas))


def read_decision(store: Any, number: int) -> Decision:
    return Decision(**json.loads(store.get(f"quorum-{number}")))
