"""The meeting in which the processes that remain after a failure, and those that wait to join, find
the next quorum.

After a failure, or when others ask to join, every member says at the store that it is there. Once
all are there or known to have failed, the first one to see that writes down the next quorum, and
all read it. A member that is not there has failed if a launcher says so, if its heartbeats had
stopped for silent_seconds before and still do, or if it misses several of them during the meeting.

There is one store, so there is one next quorum: if a link divides the ranks, those that reach the
store continue, and the others end. Two parts of a run never both continue.
"""

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from adloco.distributed.launch.launcher import LATE_SECONDS
from adloco.distributed.launch.rank_store import Quorum, StoreGoneError, connect, report_death
from adloco.elastic.membership import TABLE, Action, Seen, State
from adloco.elastic.store import (
    OVER,
    Decision,
    beats_of_launcher,
    decide,
    is_decided,
    read_decision,
)
from adloco.elastic.watch import SILENT_SECONDS, Silence, beats, known_silent
from adloco.errors import RankFailureError

LOOK_SECONDS = 0.2
"""From one look at the store to the next, while a process waits for others."""
EXPELLED_SECONDS = LATE_SECONDS
"""Seconds until a launcher has ended a process that is taken for failed; so the members of the next
group come after each other by as much.
"""
TAKEN_FOR_FAILED = (
    "the other ranks have taken this one for failed, because it gave no sign of life, and have "
    "continued without it"
)
LAUNCHER_SECONDS = 1.0
"""A launcher is gone if it gives no sign of life for so long; one that lives gives many."""


def first_quorum() -> Quorum | None:
    """The quorum of the processes that were started together, or for one that was started later the
    next one that it is in; None if the run ends before.
    """
    process, started_together = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Quorum.of_all() if process < started_together else join(process)


def can_grow(quorum: Quorum, shape: tuple[int, int], most_islands: int) -> bool:
    """True if processes that ask to join make up another island, and there is room for it; the
    arguments are those of `next_quorum`.
    """
    size = math.prod(shape)
    room = len(quorum.members) < most_islands * size
    return room and len(_asking(connect(), quorum.number, ())) >= size


@contextmanager
def _at_store(doing: str) -> Iterator[None]:
    """Raise RankFailureError if the store ends with the process that keeps it.

    doing: What this process did meanwhile.
    """
    try:
        yield
    except StoreGoneError as error:
        raise RankFailureError(
            f"the process that started the ranks ended while this one {doing}"
        ) from error


@_at_store("was to meet the others")
def come(quorum: Quorum) -> None:
    """Say that this process is at the meeting after a quorum. `next_quorum` says so too; a process
    that has to wait for a disk first says it before, so that it is not taken for failed.
    """
    connect().set(f"joined-{quorum.number + 1}-{quorum.process}", "")


@_at_store("met the others")
def next_quorum(
    quorum: Quorum, shape: tuple[int, int], most_islands: int, silent_seconds: float
) -> Quorum | None:
    """Meet the other processes again; called by all that remain, outside the process group.

    Args:
        shape: Shards and replicas of an island. One of which a rank has failed is left out, and
            its others ask to join.
        most_islands: More islands than that have nothing to do.
        silent_seconds: A process that gives no sign of life for so long has failed. Those that
            are only late at the meeting are waited for.

    Returns:
        The next quorum that this process is in; None if the run ends before.

    Raises:
        RankFailureError: No island is whole, or the others have taken this process for failed.
    """
    come(quorum)
    store, number, process = connect(), quorum.number + 1, quorum.process
    launchers = Silence(round(LAUNCHER_SECONDS / LOOK_SECONDS))
    states = _states_at_meeting(store, quorum, silent_seconds, launchers)
    present = [member for member in quorum.members if states[member] is State.WAITING]
    if is_decided(store, number):
        decision = read_decision(store, number)
    else:
        failed = [member for member in quorum.members if member not in present]
        asking = _asking(store, quorum.number, failed)
        gone = _silent_askers(store, number, asking)
        asking = [each for each in asking if each not in gone]
        chosen = choose(quorum.members, present, asking, math.prod(shape), most_islands)
        if not chosen:
            raise RankFailureError(
                f"{len(present)} of {len(quorum.members)} ranks remain, too few for an island of "
                f"{math.prod(shape)}"
            )
        mine = Decision(members=chosen, failed=failed, shape=[*shape])
        decision = decide(store, number, mine)
        for each in gone - {*decision.members}:
            report_death(store, each, "gave no sign of life while it waited to join")
    if process in decision.failed:
        raise RankFailureError(TAKEN_FOR_FAILED)
    seen = Seen.CHOSEN if process in decision.members else Seen.LEFT_OUT
    if TABLE[State.WAITING, seen].action is Action.JOIN:
        return join(process)
    _wait_until_ended(store, decision.failed, launchers)
    return Quorum(number=number, members=tuple(decision.members), process=process)


@_at_store("waited to join")
def join(process: int) -> Quorum | None:
    """Ask to join, and wait for the quorum that this process is in; None if the run ends before.

    Raises:
        RankFailureError: The launcher of this process has ended, or that which keeps the store, or
            the others have taken this process for failed.
    """
    store, launcher, number = connect(), os.getppid(), 0
    while is_decided(store, number + 1):  # Its next quorum comes after the newest.
        number += 1
    store.set(f"asks-{store.add('asked', 1)}", str(process))
    while True:
        number += 1
        while not is_decided(store, number):
            if store.check([OVER]):
                return None
            if os.getppid() != launcher:
                raise RankFailureError("the process that started the ranks is gone")
            if store.check([f"dead-{process}"]):
                raise RankFailureError(TAKEN_FOR_FAILED)
            store.add(_waits(process), 1)
            time.sleep(LOOK_SECONDS)
        members = tuple(read_decision(store, number).members)
        if process in members:
            return Quorum(number=number, members=members, process=process)


def shape_of(quorum: Quorum) -> tuple[int, int]:
    """Shards and replicas of an island, as they were decided with a quorum after the first."""
    shards, replicas = read_decision(connect(), quorum.number).shape
    return shards, replicas


def islands_of(members: Sequence[int], size: int) -> list[list[int]]:
    """Neighbours by islands of this many ranks; the last one may have fewer."""
    return [list(members[first : first + size]) for first in range(0, len(members), size)]


def failed_islands(before: Quorum, after: Quorum, size: int) -> list[int]:
    """The islands of a quorum, by number from 0, of which a rank is not in the next one.

    size: Ranks of an island.
    """
    islands = islands_of(before.members, size)
    return [number for number, ranks in enumerate(islands) if not {*ranks} <= {*after.members}]


def _states_at_meeting(
    store: Any, quorum: Quorum, silent_seconds: float, launchers: Silence
) -> dict[int, State]:
    """Return the state of each member, once nobody is waited for any more or the meeting is over.

    launchers: Looks for signs of life of the launchers of those that are late.
    """
    number, keys = quorum.number + 1, quorum.keys(store)
    silence = Silence(round(min(SILENT_SECONDS, silent_seconds) / LOOK_SECONDS))
    ranks = {member: rank for rank, member in enumerate(quorum.members)}
    states = dict.fromkeys(quorum.members, State.TRAINING)

    def see(member: int, seen: Seen) -> None:
        states[member] = TABLE[states[member], seen].state

    def awaited() -> list[int]:
        return [member for member, state in states.items() if state is State.TRAINING]

    while True:
        for member in awaited():
            if store.check([f"joined-{number}-{member}"]):
                see(member, Seen.ARRIVAL)
        late = awaited()
        silent = silence.look({member: beats(keys, ranks[member]) for member in late})
        launchers.look({member: beats_of_launcher(store, member) for member in late})
        for member in late:
            if store.check([f"dead-{member}"]):
                see(member, Seen.REPORTED)
            elif member in silent or known_silent(keys, ranks[member]):
                see(member, Seen.SILENCE)
        if not awaited() or is_decided(store, number):
            return states
        time.sleep(LOOK_SECONDS)


def choose(
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


def _asking(store: Any, number: int, failed: Collection[int]) -> list[int]:
    """Ids of the processes that have asked to join, live, and are not in a quorum.

    Args:
        number: The newest quorum.
        failed: Processes that have failed since then.
    """
    asked = [int(store.get(f"asks-{turn + 1}")) for turn in range(store.add("asked", 0))]
    members = read_decision(store, number).members if number else []
    found = [
        process
        for process in dict.fromkeys(asked)
        if process not in {*members, *failed} and not store.check([f"dead-{process}"])
    ]
    if not found:
        return []
    # One that has joined and failed since then may have nobody left who says so.
    earlier = (read_decision(store, each).failed for each in range(1, number + 1))
    gone = {process for decision in earlier for process in decision}
    return [process for process in found if process not in gone]


def _silent_askers(store: Any, number: int, asking: Sequence[int]) -> set[int]:
    """Processes among these that wait to join and give no sign of life until the quorum of this
    number is decided; its members wait no longer, so they may be silent then.

    A machine that was cut off while its processes waited has nobody left who could say so.
    """
    counts = {process: store.add(_waits(process), 0) for process in asking}
    deadline = time.monotonic() + SILENT_SECONDS
    while counts and time.monotonic() < deadline and not is_decided(store, number):
        time.sleep(LOOK_SECONDS)
        counts = {each: seen for each, seen in counts.items() if store.add(_waits(each), 0) == seen}
    return set() if is_decided(store, number) else {*counts}


def _waits(process: int) -> str:
    """The key of the signs of life of a process that waits to join."""
    return f"waits-{process}"


def _wait_until_ended(store: Any, failed: Iterable[int], launchers: Silence) -> None:
    """Give launchers that live time to end processes that are taken for failed, which may hold a
    lock.
    """
    deadline = time.monotonic() + EXPELLED_SECONDS
    left = [process for process in failed if beats_of_launcher(store, process)]
    while left and time.monotonic() < deadline:
        gone = launchers.look({process: beats_of_launcher(store, process) for process in left})
        left = [each for each in left if each not in gone and not store.check([f"dead-{each}"])]
        time.sleep(LOOK_SECONDS if left else 0)
