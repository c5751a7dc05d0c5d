"""Signals that come while the main thread cannot act on them."""

import os
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from adloco.distributed.launch import signals
from adloco.distributed.launch.signals import LastResort, signals_passed_to, told_to_end

LONGEST = timedelta(seconds=100)


def test_a_signal_is_heard_while_the_main_thread_waits_in_torch() -> None:
    """The main thread waits for a key in C++, as for a rank in a collective; Python's handler can
    run only after that. While the main thread is busy, nothing is cut off.
    """
    store = dist.HashStore()
    acted: list[int] = []
    unheard: list[int] = []
    busy = [True, True, False]

    def end(number: int) -> None:
        assert not acted
        unheard.append(number)
        store.set("came", "now")

    last_resort = LastResort(act=end, seconds=0.05, busy=lambda: busy.pop(0))
    with told_to_end(acted.append, last_resort):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        store.wait(["came"], LONGEST)
    assert unheard == acted == [signal.SIGTERM]
    assert busy == []


def test_a_signal_that_the_main_thread_acts_on_needs_no_last_resort() -> None:
    acted = threading.Event()
    unheard: list[int] = []
    last_resort = LastResort(act=unheard.append, seconds=100.0, busy=lambda: False)
    with told_to_end(lambda number: acted.set(), last_resort):
        os.kill(os.getpid(), signal.SIGTERM)
        assert acted.wait(100)
    assert not unheard
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("wakes", [False, True])
def test_ranks_get_a_signal_once_while_their_launcher_waits_in_torch(
    wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher wakes up while its rank saves, or not before that has ended."""
    monkeypatch.setattr(signals, "UNHEARD_SECONDS", 0.05)
    store, ended = dist.HashStore(), threading.Event()
    sent: list[int] = []
    unheard: list[int] = []

    def send(number: int) -> None:
        sent.append(number)
        if wakes:
            store.set("woken", "now")
        else:
            ended.set()

    def end(number: int) -> None:
        unheard.append(number)
        store.set("woken", "now")

    rank: Any = SimpleNamespace(poll=lambda: 0 if ended.is_set() else None, send_signal=send)
    with signals_passed_to(lambda: [rank], end) as received:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        store.wait(["woken"], LONGEST)
        ended.set()
    assert received == sent == [signal.SIGTERM]
    assert unheard == ([] if wakes else [signal.SIGTERM])
