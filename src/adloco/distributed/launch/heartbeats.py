"""Heartbeats: a thread of each rank counts up in the store at which the ranks met, and looks at the
counters of the others. A rank that is slow or waits still counts; one that is stopped, or whose
machine or link is down, does not.

Looks are counted, not seconds, so that a rank that was stopped itself and goes on blames nobody.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from adloco.errors import LostRankError

BEATS = 4
"""Heartbeats, and looks at those of the others, in timeout_seconds."""
BEAT_SECONDS = 0.5
"""The longest time from one sign of life to the next."""
SILENT_SECONDS = 3.0
"""A rank that others know to be in trouble is lost without a sign of life for so long; one that
lives gives several.
"""
START_SECONDS = 30.0
"""How long ranks that were started together may come after each other, even if timeout_seconds is
shorter: imports alone take seconds.
"""


class Silence:
    """How many looks in a row have found a counter unchanged."""

    def __init__(self, looks: int = BEATS) -> None:
        self._looks = looks
        self._counts: dict[str, int] = {}
        self._unchanged: dict[str, int] = {}

    def look(self, counts: Mapping[str, int]) -> list[str]:
        """Return the counters that so many looks in a row have found unchanged.

        counts: The counters by name.
        """
        for name, count in counts.items():
            same = self._counts.get(name) == count
            self._unchanged[name] = self._unchanged.get(name, 0) + 1 if same else 0
        self._counts = dict(counts)
        return [name for name in counts if self._unchanged[name] >= self._looks]


class Heartbeats:
    """The heartbeats of all ranks in a store."""

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_seconds: float) -> None:
        """
        Args:
            store: The store at which the ranks met.
            rank: This rank.
            num_ranks: All ranks.
            timeout_seconds: A rank that is silent for so long is lost.
        """
        self._store = store
        self._rank = rank
        self._others = [str(other) for other in range(num_ranks) if other != rank]
        self._timeout_seconds = timeout_seconds
        self._silence = Silence()
        store.set(f"host-{rank}", socket.gethostname())

    def beat(self) -> LostRankError | None:
        """Count up, look at the others, and return the error if one is lost.

        Called `BEATS` times in timeout_seconds.
        """
        self.count_up()
        counts = {other: beats(self._store, int(other)) for other in self._others}
        silent = self._silence.look(counts)
        for other in silent:
            self._store.set(f"silent-{other}", str(counts[other]))
        if not silent:
            return None
        return LostRankError(
            f"{with_host(self._store, int(silent[0]))} has given no sign of life for "
            f"timeout_seconds = {self._timeout_seconds:g} s; it is stopped, or its machine or link "
            "is down"
        )

    def count_up(self) -> None:
        """Give a sign of life."""
        self._store.add(f"beats-{self._rank}", 1)


def beats(store: Any, rank: int) -> int:
    """How many signs of life a rank has given."""
    return int(store.add(f"beats-{rank}", 0))


def known_silent(store: Any, rank: int) -> bool:
    """True if another rank has found this one silent for timeout_seconds, and it still is."""
    key = f"silent-{rank}"
    return store.check([key]) and int(store.get(key)) == beats(store, rank)


def with_host(store: Any, rank: int) -> str:
    """A rank and its machine, in words."""
    key = f"host-{rank}"
    known = store.check([key])
    host = store.get(key).decode(errors="replace") if known else "an unknown machine"
    return f"rank {rank} on {host}"


def silent_ranks(store: Any, rank: int, num_ranks: int, wait: Callable[[], None]) -> list[str]:
    """Name the other ranks that give no sign of life during a wait.

    Args:
        store: The store at which the ranks met.
        rank: This rank.
        num_ranks: All ranks.
        wait: Waits for longer than living ranks take from one sign of life to the next.
    """
    # A rank that has never given a sign of life does not give any.
    others = [each for each in range(num_ranks) if each != rank and beats(store, each)]
    before = {each: beats(store, each) for each in others}
    wait()
    return [with_host(store, each) for each in others if beats(store, each) == before[each]]


def watch_progress(
    progress: Callable[[], int],
    over: threading.Event,
    timeout_seconds: float,
    on_silence: Callable[[], None],
) -> None:
    """Call `on_silence` if a counter stays unchanged for timeout_seconds before `over` is set.

    A thread that talks to a store cannot time itself: it waits for ever if the store is frozen.
    """
    silence = Silence()
    while not over.wait(timeout_seconds / BEATS):
        if silence.look({"progress": progress()}):
            on_silence()
            return
