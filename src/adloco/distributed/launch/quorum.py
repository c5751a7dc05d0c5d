"""Which processes train together, and how those that are left meet again after one is lost.

A *quorum* is a set of processes that form one process group, in the order of their ranks. A process
has an id: its rank at the start, or the next free number if it was started later. After a loss, or
when others ask to join, every process that is left says at the store that it is there. Once all are
there or known to be lost, the first one to see that writes down the next quorum, and all read it.
A process that is not there is lost if a launcher says so, if its heartbeats had stopped for
timeout_seconds before and still do, or if it misses several of them during the meeting.

There is one store, so there is one next quorum: if a link divides the ranks, those that reach the
store go on, and the others end. Two parts of a run never both go on.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.heartbeats import SILENT_SECONDS, Silence, beats, known_silent
from adloco.distributed.launch.restarts import CONNECT_SECONDS, of_this_start
from adloco.errors import LostRankError

LOOK_SECONDS = 0.2
"""From one look at the store to the next, while a process waits for others."""
EXPELLED_SECONDS = 3.0
"""How long to wait until a launcher on this machine has ended a process that is taken for lost."""
ENDS_LOST = "ends-lost"
"""The key that is set if a launcher ends processes that are taken for lost."""
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
        return dist.PrefixStore(f"quorum-{self.number}", store)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is written at the store about a quorum."""

    members: list[int]
    lost: list[int]
    """Ids of the members before that gave no sign of life."""
    shape: list[int]
    """Shards and replicas of an island."""


def connect() -> Any:
    """A new connection to the store at which torchrun (or `start_ranks`) let the ranks meet."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return of_this_start(store)


def started_later() -> bool:
    """True if a launcher has started this process to take the place of a lost one."""
    return int(os.environ.get("RANK", "0")) >= int(os.environ.get("WORLD_SIZE", "1"))


def first_quorum() -> Quorum | None:
    """The quorum of the processes that were started together, or for one that was started later the
    next one that it is in; None if the run ends before.
    """
    count, process = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if started_later():
        return join(process)
    return Quorum(number=0, members=tuple(range(count)), process=process)


def report_death(store: Any, process: int, how: str) -> None:
    """Tell all that a process has ended, which it could not do itself.

    Args:
        store: The store of the launcher that started it.
        process: Its id.
        how: How it ended: the rest of a sentence about it.
    """
    _note_death(of_this_start(store), process, how)


def end_lost(store: Any) -> None:
    """Say that this launcher ends its processes that are taken for lost."""
    of_this_start(store).set(ENDS_LOST, "")


def _note_death(keys: Any, process: int, how: str) -> None:
    keys.set(f"dead-{process}", how)
    keys.add("deaths", 1)


def later_quorums(store: Any, number: int) -> list[Decision]:
    """What was decided after quorum `number`; called by a launcher."""
    keys = of_this_start(store)
    return [_read(keys, later) for later in range(number + 1, _newest(keys, number) + 1)]


def can_grow(quorum: Quorum, shape: tuple[int, int], most_islands: int) -> bool:
    """True if processes that ask to join make up another island, and there is room for it.

    Args: as those of `next_quorum`.
    """
    size = math.prod(shape)
    room = len(quorum.members) < most_islands * size
    return room and len(_asking(connect(), quorum.number, ())) >= size


@contextmanager
def _at_store(doing: str) -> Iterator[None]:
    """Raise LostRankError if the store ends with the process that keeps it.

    doing: What this process did meanwhile.
    """
    try:
        yield
    except dist.DistError as error:
        raise LostRankError(
            f"the process that started the ranks ended while this one {doing}"
        ) from error


@_at_store("was to meet the others")
def come(quorum: Quorum) -> None:
    """Say that this process is at the meeting after a quorum. `next_quorum` says so too; a process
    that has to wait for a disk first says it before, so that it is not taken for lost.
    """
    connect().set(f"joined-{quorum.number + 1}-{quorum.process}", "")


@_at_store("met the others")
def next_quorum(
    quorum: Quorum, shape: tuple[int, int], most_islands: int, timeout_seconds: float
) -> Quorum | None:
    """Meet the other processes again; called by all that are left, outside the process group.

    Args:
        quorum: The quorum before.
        shape: Shards and replicas of an island. One that has lost a rank is left out, and its
            others ask to join.
        most_islands: More islands than that have nothing to do.
        timeout_seconds: A process that gives no sign of life for so long is lost. Those that are
            only late at the meeting are waited for.

    Returns:
        The next quorum that this process is in; None if the run ends before.

    Raises:
        LostRankError: No island is whole, or the others have taken this process for lost.
    """
    come(quorum)
    store, number = connect(), quorum.number + 1
    present = _present(store, quorum, timeout_seconds)
    if not store.check([f"quorum-{number}"]):
        lost = [member for member in quorum.members if member not in present]
        asking = _asking(store, quorum.number, lost)
        chosen = _choose(quorum.members, present, asking, math.prod(shape), most_islands)
        if not chosen:
            raise LostRankError(
                f"{len(present)} of {len(quorum.members)} ranks are left, too few for an island of "
                f"{math.prod(shape)}"
            )
        mine = Decision(members=chosen, lost=lost, shape=[*shape])
        store.compare_set(f"quorum-{number}", "", json.dumps(asdict(mine)))
    decided = _read(store, number)
    if quorum.process in decided.lost:
        raise LostRankError(
            "the other ranks have taken this one for lost, because it gave no sign of life, and "
            "have gone on without it"
        )
    if quorum.process not in decided.members:
        return join(quorum.process)
    _wait_until_ended(store, decided.lost)
    return _decided(store, number, quorum.process)


def lost_islands(before: Quorum, after: Quorum, size: int) -> list[int]:
    """The islands of a quorum, by number from 0, of which a rank is not in the next one.

    size: Ranks of an island.
    """
    islands = _islands(before.members, size)
    return [number for number, ranks in enumerate(islands) if not {*ranks} <= {*after.members}]


def end_all(quorum: Quorum) -> None:
    """Tell processes that wait to join that the run has ended; called by its members."""
    if quorum.number > 0:
        connect().set(OVER, "")


def leave(quorum: Quorum) -> None:
    """Tell the others that this process ends, and that they go on."""
    _note_death(connect(), quorum.process, "was told to leave")


@_at_store("waited to join")
def join(process: int) -> Quorum | None:
    """Ask to join, and wait for the quorum that this process is in; None if the run ends before."""
    store = connect()
    number = _newest(store, 0)
    store.set(f"asks-{store.add('asked', 1)}", str(process))
    while True:
        number += 1
        while not store.check([f"quorum-{number}"]):
            if store.check([OVER]):
                return None
            time.sleep(LOOK_SECONDS)
        if process in _read(store, number).members:
            return _decided(store, number, process)


def _present(store: Any, quorum: Quorum, timeout_seconds: float) -> list[int]:
    """The members that are at the meeting, once all others are lost or the meeting is over."""
    number, keys = quorum.number + 1, quorum.keys(store)
    silence = Silence(round(min(SILENT_SECONDS, timeout_seconds) / LOOK_SECONDS))
    ranks = {member: rank for rank, member in enumerate(quorum.members)}
    lost: set[int] = set()
    while True:
        present = [
            member
            for member in quorum.members
            if member not in lost and store.check([f"joined-{number}-{member}"])
        ]
        late = [member for member in quorum.members if member not in {*present, *lost}]
        silent = silence.look({str(member): beats(keys, ranks[member]) for member in late})
        lost |= {
            member
            for member in late
            if str(member) in silent
            or store.check([f"dead-{member}"])
            or known_silent(keys, ranks[member])
        }
        if {*late} <= lost or store.check([f"quorum-{number}"]):
            return present
        time.sleep(LOOK_SECONDS)


def _choose(
    members: Sequence[int],
    present: Collection[int],
    asking: Iterable[int],
    size: int,
    most_islands: int,
) -> list[int]:
    """The members of the next quorum: whole islands as they were, then new ones of all others.

    size: Ranks of an island.
    """
    islands = [island for island in _islands(members, size) if {*island} <= {*present}]
    kept = {member for island in islands for member in island}
    others = [*(member for member in present if member not in kept), *asking]
    islands += _islands(others, size)
    whole = [island for island in islands if len(island) == size][:most_islands]
    return [member for island in whole for member in island]


def _islands(members: Sequence[int], size: int) -> list[list[int]]:
    """Neighbours by islands of this many ranks; the last one may have fewer."""
    return [list(members[first : first + size]) for first in range(0, len(members), size)]


def _asking(store: Any, number: int, lost: Collection[int]) -> list[int]:
    """Ids of the processes that have asked to join, live, and are not in a quorum.

    number: The newest quorum.
    lost: Processes that are lost since then.
    """
    asked = [int(store.get(f"asks-{turn + 1}")) for turn in range(store.add("asked", 0))]
    members = _read(store, number).members if number else []
    return [
        process
        for process in dict.fromkeys(asked)
        if process not in {*members, *lost} and not store.check([f"dead-{process}"])
    ]


def _wait_until_ended(store: Any, lost: Iterable[int]) -> None:
    """Give a launcher time to end processes that are taken for lost, which may hold a lock."""
    if not store.check([ENDS_LOST]):
        return
    deadline = time.monotonic() + EXPELLED_SECONDS
    left = list(lost)
    while left and time.monotonic() < deadline:
        left = [process for process in left if not store.check([f"dead-{process}"])]
        time.sleep(LOOK_SECONDS if left else 0)


def _newest(store: Any, number: int) -> int:
    """The number of the newest quorum, if that of an earlier one is `number`."""
    while store.check([f"quorum-{number + 1}"]):
        number += 1
    return number


def _decided(store: Any, number: int, process: int) -> Quorum:
    decided = _read(store, number)
    shards, replicas = decided.shape
    members = tuple(decided.members)
    return Quorum(number=number, members=members, process=process, shape=(shards, replicas))


def _read(store: Any, number: int) -> Decision:
    return Decision(**json.loads(store.get(f"quorum-{number}")))
