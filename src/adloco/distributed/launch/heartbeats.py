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


class Silence:
    """How many looks in a row have found a counter unchanged."""

    def __init__(self, looks: int = BEATS) -> None:
        self._looks = looks
        self._counts: dict[str, int] = {}
        self._unchanged: dict[str, int] = {}

    def look(self, counts: Mapping[str, int]) -> str | None:
        """Return the first counter that so many looks in a row have found unchanged, or None.

        counts: The counters by name.
        """
        for name, count in counts.items():
            same = self._counts.get(name) == count
            self._unchanged[name] = self._unchanged.get(name, 0) + 1 if same else 0
        self._counts = dict(counts)
        return next((name for name in counts if self._unchanged[name] >= self._looks), None)


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
        lost = self._silence.look({other: beats(self._store, int(other)) for other in self._others})
        if lost is None:
            return None
        return LostRankError(
            f"{with_host(self._store, int(lost))} has given no sign of life for timeout_seconds = "
            f"{self._timeout_seconds:g} s; it is stopped, or its machine or link is down"
        )

    def count_up(self) -> None:
        """Give a sign of life."""
        self._store.add(f"beats-{self._rank}", 1)


def beats(store: Any, rank: int) -> int:
    """How many signs of life a rank has given."""
    return int(store.add(f"beats-{rank}", 0))


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
