"""How the ranks that remain after a failure meet again; each process is a thread here."""

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from adloco.distributed.launch.failures import wait_for_members
from adloco.distributed.launch.rank_store import Quorum, connect, report_death
from adloco.elastic import meeting
from adloco.elastic.meeting import (
    EXPELLED_SECONDS,
    LAUNCHER_SECONDS,
    LOOK_SECONDS,
    can_grow,
    choose,
    come,
    first_quorum,
    join,
    next_quorum,
    shape_of,
)
from adloco.elastic.store import (
    Decision,
    beat_as_launcher,
    decide,
    end_all,
    is_decided,
    read_decision,
    report_start,
)
from adloco.elastic.watch import BEAT_SECONDS, BEATS, SILENT_SECONDS, Heartbeats
from adloco.errors import RankFailureError
from tests.elastic.threads import at_once

ALONE = (1, 1)


def members(process: int, number: int = 0, ids: tuple[int, ...] = (0, 1, 2, 3)) -> Quorum:
    return Quorum(number=number, members=ids, process=process)


def after(process: int, shape: tuple[int, int] = ALONE, seconds: float = 60.0) -> Any:
    return lambda: next_quorum(members(process), shape, 4, seconds)


def test_those_that_remain_after_a_death_are_numbered_again(store: Any) -> None:
    report_death(store, 1, "was ended by signal 9")
    found = at_once(after(3), after(0), after(2))
    assert [quorum.members for quorum in found] == [(0, 2, 3)] * 3
    assert [(quorum.number, quorum.rank) for quorum in found] == [(1, 2), (1, 0), (1, 1)]
    decision = read_decision(store, 1)
    assert (decision.members, decision.failed) == ([0, 2, 3], [1])
    assert not is_decided(store, 2)


def test_a_silent_one_is_left_out_and_told_so_if_it_comes(store: Any) -> None:
    """The number of looks follows silent_seconds: five of them here."""
    found = at_once(after(0, seconds=1), after(1, seconds=1), after(3, seconds=1))
    assert [quorum.members for quorum in found] == [(0, 1, 3)] * 3
    (late,) = at_once(after(2))
    assert "have taken this one for failed" in str(late)


def test_one_that_lives_is_waited_for(store: Any) -> None:
    """Rank 1 counts up 20 times before it comes, for longer than a silent one is waited for."""

    def late() -> Any:
        keys, pause = members(1).keys(connect()), threading.Event()
        hearts = Heartbeats(keys, 1, 4, 60)
        for _ in range(20):
            hearts.count_up()
            pause.wait(LOOK_SECONDS / 2)
        return after(1)()

    found = at_once(after(0, seconds=1), late, after(2), after(3))
    assert [quorum.members for quorum in found] == [(0, 1, 2, 3)] * 4


class Clock:
    """Time that passes only while `meeting` waits, and what other processes do meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], Any]]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [act for moment, act in self.events if moment <= self.now]
        self.events = [event for event in self.events if event[0] > self.now]
        for act in due:
            act()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = types.SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now)
    monkeypatch.setattr(meeting, "time", fake)
    return made


def comes(*processes: int) -> None:
    """Processes say that they are at the meeting after the first quorum."""
    for process in processes:
        come(members(process))


def find_silent(rank: int) -> Heartbeats:
    """Let rank 0 find one of the first quorum silent; returns the heartbeats of that one."""
    ours, its = (Heartbeats(members(each).keys(connect()), each, 4, 40.0) for each in (0, rank))
    others = [Heartbeats(members(0).keys(connect()), each, 4, 40.0) for each in {1, 2, 3} - {rank}]
    its.count_up()
    for _ in range(BEATS + 1):
        for other in others:
            other.count_up()
        ours.beat()
    return its


def test_a_stopped_one_is_not_waited_for_again(store: Any, clock: Clock) -> None:
    """Its heartbeats have stopped for silent_seconds already."""
    find_silent(1)
    comes(2, 3)
    assert next_quorum(members(0), ALONE, 4, 40.0).members == (0, 2, 3)
    assert clock.now == 0


def test_a_stopped_one_that_continues_is_waited_for(store: Any, clock: Clock) -> None:
    find_silent(1).count_up()
    comes(2, 3)
    clock.events = [(1.0, lambda: comes(1))]
    assert next_quorum(members(0), ALONE, 4, 40.0).members == (0, 1, 2, 3)
    assert clock.now == pytest.approx(1.0, abs=1.1 * LOOK_SECONDS)


@pytest.mark.parametrize(("beating", "found"), [(False, (0, 2, 3)), (True, (0, 1, 2, 3))])
def test_one_that_is_late_is_waited_for_as_long_as_it_gives_signs_of_life(
    beating: bool, found: tuple[int, ...], store: Any, clock: Clock
) -> None:
    """Rank 1 would come after 20 s. Nobody says that it was killed."""
    heart = Heartbeats(members(1).keys(connect()), 1, 4, 600.0)
    heart.count_up()
    comes(2, 3)
    beats = [turn * BEAT_SECONDS for turn in range(40)] if beating else []
    clock.events = [(moment, heart.count_up) for moment in beats] + [(20.0, lambda: comes(1))]
    assert next_quorum(members(0), ALONE, 4, 600.0).members == found
    assert clock.now == pytest.approx(20.0 if beating else SILENT_SECONDS, abs=1.1 * LOOK_SECONDS)


@pytest.mark.parametrize(
    ("launcher_beats_for", "ends_after", "waited"),
    [
        (None, 99.0, 0.0),
        (99.0, 1.0, 1.0),
        (99.0, 99.0, EXPELLED_SECONDS),
        (0.5, 99.0, 0.5 + LAUNCHER_SECONDS),
    ],
)
def test_a_launcher_that_lives_has_time_to_end_a_failed_one(
    launcher_beats_for: float | None, ends_after: float, waited: float, store: Any, clock: Clock
) -> None:
    def beat() -> None:
        beat_as_launcher(store, 0)
        if launcher_beats_for is not None and clock.now < launcher_beats_for:
            clock.events.append((clock.now + LOOK_SECONDS / 2, beat))

    clock.events = [(ends_after, lambda: report_death(store, 1, "was ended by signal 9"))]
    if launcher_beats_for is not None:
        report_start(store, 1, launcher=0)
        beat()
    find_silent(1)
    comes(2, 3)
    assert next_quorum(members(0), ALONE, 4, 40.0).members == (0, 2, 3)
    assert clock.now == pytest.approx(waited, abs=2.1 * LOOK_SECONDS)


def test_a_failed_machine_is_waited_for_once(store: Any, clock: Clock) -> None:
    """Its launcher is gone too, which is seen while its ranks are waited for."""
    report_start(store, 1, launcher=0)
    beat_as_launcher(store, 0)
    Heartbeats(members(1).keys(connect()), 1, 4, 600.0).count_up()
    comes(2, 3)
    assert next_quorum(members(0), ALONE, 4, 600.0).members == (0, 2, 3)
    assert clock.now == pytest.approx(SILENT_SECONDS, abs=2.1 * LOOK_SECONDS)


def test_an_island_of_which_a_rank_failed_is_left_out_until_it_is_whole_again(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_death(store, 1, "was ended by signal 9")
    spare: list[Any] = []
    waiting = threading.Thread(target=lambda: spare.append(after(0, (2, 1))()))
    waiting.start()
    found = at_once(after(2, (2, 1)), after(3, (2, 1)))
    assert [(quorum.members, shape_of(quorum)) for quorum in found] == [((2, 3), (2, 1))] * 2
    assert not can_grow(found[0], (2, 1), most_islands=4)
    monkeypatch.setenv("RANK", "4")  # The process that a launcher starts in the place of rank 1.
    new: list[Any] = []
    other = threading.Thread(target=lambda: new.append(first_quorum()))
    other.start()
    while not can_grow(found[0], (2, 1), most_islands=4):
        pass
    assert not can_grow(found[0], (2, 1), most_islands=1)
    grown = at_once(*[lambda q=q: next_quorum(q, (2, 1), 4, 60) for q in found])
    for thread in (waiting, other):
        thread.join(60)
    (found_by_all,) = {quorum.members for quorum in [*grown, *spare, *new]}
    # Those who join do so in the order in which they came.
    assert found_by_all[:2] == (2, 3) and sorted(found_by_all[2:]) == [0, 4]


def test_too_few_remain_for_an_island(store: Any) -> None:
    for process in (1, 2, 3):
        report_death(store, process, "was ended by signal 9")
    (error,) = at_once(after(0, (2, 1)))
    assert str(error) == "1 of 4 ranks remain, too few for an island of 2"


def test_the_end_of_a_run_ends_those_that_wait(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    end_all(members(0, number=1))
    assert first_quorum() is None


def test_one_that_waits_ends_with_the_launcher(
    store: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise dist.DistNetworkError("Broken pipe")  # What the store raises at the next look.

    monkeypatch.setenv("RANK", "4")
    for waits, doing in ((first_quorum, "waited to join"), (after(0), "met the others")):
        clock.events = [(clock.now, gone)]
        with pytest.raises(RankFailureError, match=f"ended while this one {doing}"):
            waits()


def test_a_rank_that_dies_before_the_group_stands_is_not_waited_for(store: Any) -> None:
    report_death(store, 2, "was ended by signal 9")
    with pytest.raises(RankFailureError, match="rank 2 was ended by signal 9"):
        wait_for_members(members(0), 60)


KEEPS_STORE = """
from adloco.distributed.launch.rank_store import local_store
store = local_store()
print(store.port, flush=True)
input()
"""


@pytest.mark.parametrize("killed", ["before it asks", "while it waits"])
def test_a_rank_that_waits_to_join_ends_with_the_launcher_that_keeps_the_store(
    killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", KEEPS_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", launcher.stdout.readline().decode().strip())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if killed == "before it asks":
        launcher.kill()
        launcher.wait()
    began = time.monotonic()
    timer = threading.Timer(0.5, launcher.kill)
    timer.start()
    with pytest.raises(RankFailureError, match="the process that started the ranks"):
        join(5)
    assert time.monotonic() - began < 10, "torch would try to reach it for half a minute"
    timer.join()
    launcher.communicate()


def test_a_rank_that_waits_to_join_ends_with_its_own_launcher(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store can be kept on another machine."""
    parents = iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RankFailureError, match="the process that started the ranks is gone"):
        join(5)


def test_a_machine_that_is_gone_after_it_came_back_is_not_waited_for(store: Any) -> None:
    """Processes 4 and 5 joined and failed, 6 asked and is gone, and nobody says so; 7 waits."""
    decide(store, 1, Decision(members=[0, 4, 5], failed=[1], shape=[1, 1]))
    decide(store, 2, Decision(members=[0], failed=[4, 5], shape=[1, 1]))
    for turn, process in enumerate((4, 5, 6), start=1):
        store.add("asked", 1)
        store.set(f"asks-{turn}", str(process))
    assert not can_grow(members(0, 2, (0,)), (1, 2), 4), "only process 6 asks, and it is one of two"

    def meets_when_it_waits() -> Any:
        while not store.add("waits-7", 0):
            time.sleep(LOOK_SECONDS)
        return next_quorum(members(0, 2, (0,)), ALONE, 4, 60.0)

    joined, found = at_once(lambda: join(7), meets_when_it_waits)
    assert joined.members == found.members == (0, 7)
    assert not store.check(["dead-7"])
    with pytest.raises(RankFailureError, match="have taken this one for failed"):
        join(6)


def test_one_that_has_joined_is_not_missed_by_a_member_that_is_late(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quorum is decided while this member looks for signs of life of process 4."""
    store.set("asks-1", str(4))
    store.add("asked", 1)
    comes(1, 2)
    decision = Decision(members=[0, 1, 2, 4], failed=[3], shape=[1, 1])
    report_death(store, 3, "was ended by signal 9")
    choose = meeting.choose

    def decided_by_another(*arguments: Any) -> Any:
        decide(store, 1, decision)
        return choose(*arguments)

    monkeypatch.setattr(meeting, "choose", decided_by_another)
    (found,) = at_once(after(0))
    assert found.members == (0, 1, 2, 4)
    assert not store.check(["dead-4"])


def test_no_more_islands_than_there_is_work_for() -> None:
    assert choose([0, 1, 2, 3], [0, 1, 2, 3], [4, 5], size=2, most_islands=2) == [0, 1, 2, 3]
    assert choose([0, 1, 2, 3], [0, 2, 3], [4, 5], size=2, most_islands=2) == [2, 3, 0, 4]
