"""How ranks tell one that has failed from a slow one."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from adloco.distributed.launch.failures import Notes
from adloco.distributed.launch.rank_store import Quorum, report_death
from adloco.elastic.watch import (
    BEATS,
    Heartbeats,
    RankWatch,
    Silence,
    known_silent,
    missing_ranks,
    watch_progress,
)
from adloco.errors import RANK_FAILURE, OtherRankError, RankFailureError, exit_code


def test_a_counter_that_stays_is_silent_and_one_that_counts_is_not() -> None:
    silence = Silence()
    looks = [silence.look({1: 5, 2: count}) for count in range(BEATS + 1)]
    assert looks == [[]] * BEATS + [[1]]
    # It counted once before the last look.
    silence = Silence()
    assert [silence.look({1: count}) for count in [7] * BEATS + [8] * BEATS] == [[]] * 2 * BEATS
    assert silence.look({1: 8}) == [1]


def test_a_rank_without_heartbeats_is_named_with_its_machine() -> None:
    """Rank 1 counts once; rank 2 continues; rank 0 looks."""
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 3, silent_seconds=40.0) for rank in range(3)]
    store.set("host-1", "node7\x1b")
    hearts[1].beat()
    errors = []
    for _ in range(BEATS + 1):
        hearts[2].beat()
        errors.append(hearts[0].beat())
    assert errors[:-1] == [None] * BEATS
    assert isinstance(errors[-1], RankFailureError)
    assert "rank 1 on node7" in str(errors[-1])
    assert "silent_seconds = 40 s" in str(errors[-1])
    assert [known_silent(store, rank) for rank in range(3)] == [False, True, False]
    hearts[1].count_up()
    assert not known_silent(store, 1), "it gives signs of life again"


def test_a_store_that_does_not_answer_is_noticed() -> None:
    """The counter continues for three looks and then stays."""
    counts = iter([1, 2, 3, *[4] * 10])
    silent = threading.Event()
    watch_progress(lambda: next(counts), threading.Event(), 0.04, silent.set)
    assert silent.is_set()
    assert len(list(counts)) == 10 - 1 - BEATS
    over = threading.Event()
    over.set()
    watch_progress(lambda: 1, over, 0.04, lambda: (_ for _ in ()).throw(AssertionError))


def test_ranks_that_are_gone_are_named_with_their_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 1 and 3 have ended; rank 2 lives; rank 4 never came so far as to give a sign."""
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 5, silent_seconds=40.0) for rank in range(5)]
    for rank, heart in enumerate(hearts[:4]):
        store.set(f"host-{rank}", f"node{rank}")
        heart.count_up()
    monkeypatch.setattr(time, "sleep", lambda seconds: hearts[2].count_up())
    quorum = Quorum(members=tuple(range(5)), process=0)
    error = missing_ranks(SimpleNamespace(keys=store, quorum=quorum))  # type: ignore[arg-type]
    assert str(error).startswith("rank 1 on node1 and 1 more gave no sign of life after rank 0 ")


@contextmanager
def ranks_of(
    script: str, count: int, stdin: int = subprocess.PIPE
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run the script, each with its rank; killed at the end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(count)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


FREEZES = """
import os
import queue
import signal

import torch
import pytest
import torch.distributed as dist

from adloco.distributed.launch.launcher import process_group
from adloco.distributed.launch.rank_store import Quorum
from adloco.elastic.meeting import next_quorum
from adloco.elastic.watch import RankWatch
from adloco.errors import RANK_FAILURE, OtherRankError, RankFailureError, exit_code

rank = int(os.environ["RANK"])
if rank == 1:
    dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)


def group(quorum):
    end = lambda _: os._exit(9)
    watch = RankWatch(end=end, silent_seconds=2.0, timeout_seconds=2.0, recover=lambda: None)
    return process_group(2.0, watch=watch, quorum=quorum)


first = Quorum(number=0, members=(0, 1, 2), process=rank)
try:
    with group(first):
        print("all are there")
except RankFailureError as error:
    print(error)
second = next_quorum(first, (1, 1), 3, 2.0)
with group(second):
    count = torch.ones(1)
    dist.all_reduce(count)
    print(second.members, count.item())
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_freezes_while_the_group_is_made_has_failed(store: Any) -> None:
    """The others wait in the backend for its address, and for no longer than a silence takes."""
    with ranks_of(FREEZES, 3, subprocess.DEVNULL) as processes:
        said = [processes[rank].communicate(timeout=60) for rank in (0, 2)]
    for output, error in said:
        assert "rank 1 on " in output and "has given no sign of life" in output, error
        assert output.endswith("(0, 2) 2.0\n"), error


STUCK = """
import os
import queue
import sys
import threading

from adloco.distributed.launch.launcher import process_group
from adloco.distributed.launch.rank_store import Quorum
from adloco.elastic.watch import RankWatch

rank = int(os.environ["RANK"])
quorum = Quorum(number=0, members=(0, 1), process=rank)
end = lambda _: os._exit(9)
watch = RankWatch(end=end, silent_seconds=0.5, timeout_seconds=0.5, recover=lambda: None)
with process_group(0.5, watch=watch, quorum=quorum):
    print("both are there", flush=True)
    sys.stdin.read(1)
    if rank == 1:
        os._exit(0)
    threading.Event().wait()
"""


@pytest.mark.nightly
def test_a_rank_that_still_waits_for_a_failed_one_is_ended(store: Any) -> None:
    """As gloo does now and then. The others take it for killed, and it comes back."""
    with ranks_of(STUCK, 2) as processes:
        for process in processes:
            assert process.stdout is not None
            # The gloo of torch 2.9 has a line of its own before it.
            assert "both are there\n" in iter(process.stdout.readline, "")
        processes[1].communicate("x", timeout=60)
        report_death(store, 1, "has left")
        processes[0].communicate("x", timeout=60)
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 0]


def test_a_rank_ends_with_its_launcher(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would notice that it fails, and the line that is started again would start another."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    parents, ends = iter([7, 7]), queue.Queue[OtherRankError]()
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    quorum = Quorum(number=0, members=(0, 1), process=0)
    with RankWatch(end=ends.put, silent_seconds=4.0, timeout_seconds=4.0)(Notes(quorum)):
        assert "the process that started the ranks is gone" in str(ends.get(timeout=30))


KEEPS_STORE = """
from adloco.distributed.launch.rank_store import local_store
store = local_store()
print(store.port, flush=True)
input()
"""


@pytest.mark.nightly
def test_a_run_whose_store_has_ended_may_be_started_again(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers take exit code 2 for a mistake that the next start would repeat."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", KEEPS_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout
    monkeypatch.setenv("MASTER_PORT", launcher.stdout.readline().decode().strip())
    ends = queue.Queue[OtherRankError]()
    quorum = Quorum(number=0, members=(0, 1), process=0)
    before = threading.enumerate()
    with RankWatch(end=ends.put, silent_seconds=4.0, timeout_seconds=4.0)(Notes(quorum)):
        launcher.kill()
        launcher.communicate()
        assert exit_code(ends.get(timeout=30)) == RANK_FAILURE
    assert threading.enumerate() == before, "a thread that outlives the run aborts its process"


def test_a_store_that_is_frozen_at_the_end_of_a_run_is_not_waited_for(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", KEEPS_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout
    monkeypatch.setenv("MASTER_PORT", launcher.stdout.readline().decode().strip())
    quorum, ends = Quorum(number=0, members=(0, 1), process=0), queue.Queue[OtherRankError]()
    try:
        with RankWatch(end=ends.put, silent_seconds=2.0, timeout_seconds=2.0)(Notes(quorum)):
            launcher.send_signal(signal.SIGSTOP)
        assert ends.empty()
    finally:
        launcher.kill()
        launcher.communicate()
