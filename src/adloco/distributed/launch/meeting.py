"""How the processes that are left after a loss, and those that wait to join, find the next quorum.

After a loss, or when others ask to join, every process that is left says at the store that it is
there. Once all are there or known to be lost, the first one to see that writes down the next
quorum, and all read it. A process that is not there is lost if a launcher says so, if its
heartbeats had stopped for timeout_seconds before and still do, or if it misses several of them
during the meeting.

There is one store, so there is one next quorum: if a link divides the ranks, those that reach the
store go on, and the others end. Two parts of a run never both go on.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.heartbeats import SILENT_SECONDS, Silence, beats, known_silent
from adloco.distributed.launch.quorum import (
    OVER,
    Decision,
    Quorum,
    beats_of_launcher,
    connect,
    decided,
    islands_of,
    newest_number,
    read_decision,
    started_later,
)
from adloco.errors import LostRankError

LOOK_SECONDS = 0.2
"""From one look at the store to the next, while a process waits for others."""
EXPELLED_SECONDS = 3.0
"""How long to wait until a launcher has ended a process that is taken for lost."""
LAUNCHER_SECONDS = 1.0
"""A launcher is gone if it gives no sign of life for so long; one that lives gives many."""


def first_quorum() -> Quorum | None:
    """The quorum of the processes that were started together, or for one that was started later the
    next one that it is in; None if the run ends before.
    """
    count, process = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if started_later():
        return join(process)
    return Quorum(number=0, members=tuple(range(count)), process=process)


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
    launchers = Silence(round(LAUNCHER_SECONDS / LOOK_SECONDS))
    present = _present(store, quorum, timeout_seconds, launchers)
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
    decision = read_decision(store, number)
    if quorum.process in decision.lost:
        raise LostRankError(
            "the other ranks have taken this one for lost, because it gave no sign of life, and "
            "have gone on without it"
        )
    if quorum.process not in decision.members:
        return join(quorum.process)
    _wait_until_ended(store, decision.lost, launchers)
    return decided(store, number, quorum.process)


@_at_store("waited to join")
def join(process: int) -> Quorum | None:
    """Ask to join, and wait for the quorum that this process is in; None if the run ends before."""
    store = connect()
    number = newest_number(store, 0)
    store.set(f"asks-{store.add('asked', 1)}", str(process))
    while True:
        number += 1
        while not store.check([f"quorum-{number}"]):
            if store.check([OVER]):
                return None
            time.sleep(LOOK_SECONDS)
        if process in read_decision(store, number).members:
            return decided(store, number, process)


def _present(store: Any, quorum: Quorum, timeout_seconds: float, launchers: Silence) -> list[int]:
    """The members that are at the meeting, once all others are lost or the meeting is over.

    launchers: Looks for signs of life of the launchers of those that are late.
    """
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
        launchers.look({str(member): beats_of_launcher(store, member) for member in late})
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
    islands = [island for island in islands_of(members, size) if {*island} <= {*present}]
    kept = {member for island in islands for member in island}
    others = [*(member for member in present if member not in kept), *asking]
    islands += islands_of(others, size)
    whole = [island for island in islands if len(island) == size][:most_islands]
    return [member for island in whole for member in island]


def _asking(store: Any, number: int, lost: Collection[int]) -> list[int]:
    """Ids of the processes that have asked to join, live, and are not in a quorum.

    number: The newest quorum.
    lost: Processes that are lost since then.
    """
    asked = [int(store.get(f"asks-{turn + 1}")) for turn in range(store.add("asked", 0))]
    members = read_decision(store, number).members if number else []
    return [
        process
        for process in dict.fromkeys(asked)
        if process not in {*members, *lost} and not store.check([f"dead-{process}"])
    ]


def _wait_until_ended(store: Any, lost: Iterable[int], launchers: Silence) -> None:
    """Give launchers that live time to end processes that are taken for lost, which may hold a
    lock.
    """
    deadline = time.monotonic() + EXPELLED_SECONDS
    left = [process for process in lost if beats_of_launcher(store, process)]
    while left and time.monotonic() < deadline:
        gone = launchers.look({str(process): beats_of_launcher(store, process) for process in left})
        left = [
            process
            for process in left
            if str(process) not in gone and not store.check([f"dead-{process}"])
        ]
        time.sleep(LOOK_SECONDS if left else 0)
