"""Notices ranks that are stopped or cut off, by heartbeats, and gets this rank out of their group.

A thread of each rank counts up in the store at which the ranks met, looks at the counters of the
others, and reads what launchers and others say of failures. A rank that is slow or waits still
counts; one that is stopped, or whose machine or link is down, does not. Looks are counted, not
seconds, so that a rank that was stopped itself and continues blames nobody.

What the thread then does, `membership.TABLE` says. If the members are to meet, it ends what NCCL
does on this rank's GPU and cuts its connections, so that its main thread waits for nobody, and
gives signs of life until that has left the group. If it still waits after timeout_seconds, the
process is ended as one that was killed.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from adloco.distributed.launch.failures import Explain, Notes, cut_off, is_late
from adloco.distributed.launch.launcher import abort_nccl
from adloco.distributed.launch.rank_store import meeting_point, store_outlives_ranks
from adloco.elastic.connections import cut_connections, open_sockets
from adloco.elastic.membership import TABLE, Action, Seen, State
from adloco.errors import OtherRankError, RankFailureError

BEATS = 4
"""Looks at the heartbeats of the others in silent_seconds, and the fewest own ones."""
BEAT_SECONDS = 0.5
"""The longest time from one heartbeat to the next."""
SILENT_SECONDS = 3.0
"""A rank that others know to be in trouble has failed without a sign of life for so long; one that
lives gives several.
"""
GRACE_SECONDS = 2.0
"""Seconds that the main thread may take to notice a failure by itself."""
IDLE = 0.05
"""A process that computes for less than this share of timeout_seconds waits for something."""


@dataclass(frozen=True, kw_only=True)
class RankWatch:
    """Watches over the ranks of a group; `process_group` opens it."""

    end: Callable[[OtherRankError], None]
    """Called from a thread with the error if another rank failed and this one does not notice by
    itself. It must end the process.
    """
    silent_seconds: float
    """A rank that gives no sign of life for so long has failed."""
    timeout_seconds: float
    """Time for which, after a failure elsewhere, the main thread may wait for a disk, or for the
    work in the group to end, before this process is ended."""
    recover: Callable[[], None] | None = None
    """Called from a thread instead of `end` if a rank was killed, stopped or cut off. It should let
    the work in the group end soon; the connections of the group are cut. None: `end` is called.
    """

    @contextmanager
    def __call__(self, notes: Notes) -> Iterator[Explain]:
        """Watch while the context is open."""
        thread = _Thread(self, notes.quorum.rank, Notes(notes.quorum))
        thread.start()
        try:
            yield lambda error: self._explain(notes, error)
        finally:
            thread.done.set()
            # Not for ever: a store that is frozen gives no answer, and nobody would end the thread.
            thread.join(self.silent_seconds)

    def _explain(self, notes: Notes, error: Exception) -> OtherRankError | None:
        """Who has closed a connection, and write it down for the others, who may not see it."""
        own = cut_off(notes.quorum.rank, error)
        if self.recover:
            return notes.add(own)
        # Before others miss this rank, which ends now.
        return own if is_late(error) else notes.add(missing_ranks(notes) or own)


class _Thread(threading.Thread):
    """Reads the store and exchanges heartbeats through it, until `done` or the end."""

    def __init__(self, watch: RankWatch, rank: int, notes: Notes) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self._watch = watch
        self._notes = notes
        self._hearts = Heartbeats(notes.keys, rank, len(notes.quorum.members), watch.silent_seconds)
        self._over = threading.Event()
        self._reads = 0
        self._poll_seconds = min(BEAT_SECONDS, watch.silent_seconds / BEATS)
        self._kept = open_sockets()
        """Sockets that were open before the group was made, this thread's own among them."""
        self._launcher = os.getppid() if store_outlives_ranks() else 0
        """The process that started this rank and watches over it; 0: none does."""

    def run(self) -> None:
        seconds = self._watch.silent_seconds
        arguments = (lambda: self._reads, self._over, seconds, self._store_is_silent)
        progress = threading.Thread(target=watch_progress, args=arguments, daemon=True)
        progress.start()
        try:
            failure = self._first_failure()
            if failure is None:
                return
            of_rank = isinstance(failure, RankFailureError)
            seen = Seen.REPORTED if of_rank else Seen.ERROR
            if TABLE[State.TRAINING, seen].action is Action.MEET and self._watch.recover:
                self._watch.recover()
                with suppress(RuntimeError):  # NCCL's own: the group of an island is at its end.
                    abort_nccl()
                cut_connections(self._kept)
                self._wait_for_main_thread()
            else:
                self._finish(failure)
        except RuntimeError:
            # The store or the launcher is gone: either the run has just ended, or the process that
            # started the ranks has ended too early.
            self._finish(RankFailureError("the process that started the ranks is gone"))
        finally:
            self._over.set()
            # It holds the run. If it let go of it last, at Python's end, torch would abort.
            progress.join()

    def _first_failure(self) -> OtherRankError | None:
        """The first failure that is seen here or written by others; None once all is done.

        Raises:
            RuntimeError: The launcher has ended, and nobody would notice that this rank fails.
        """
        polls = max(1, round(self._watch.silent_seconds / BEATS / self._poll_seconds))
        while not self._stopped_waiting():
            if self._launcher and os.getppid() != self._launcher:
                raise RuntimeError("the launcher has ended")
            # What is read must be read before waiting: the store ends with the process that keeps
            # it.
            failure = self._notes.first()
            if failure is None and self._reads % polls == 0:
                silent = self._hearts.beat()
                failure = self._notes.add(silent) if silent else None
            if failure is not None:
                return failure
        return None

    def _wait_for_main_thread(self) -> None:
        """Give signs of life: the others wait at the meeting for a rank as long as it lives."""
        seconds = self._watch.timeout_seconds
        began, used = time.monotonic(), time.process_time()
        while not self._stopped_waiting():
            if time.monotonic() - began > seconds:
                if time.process_time() - used < IDLE * seconds:
                    # A collective of gloo can miss that a connection was closed. This rank joins
                    # the others as a new process.
                    os.kill(os.getpid(), signal.SIGKILL)
                began, used = time.monotonic(), time.process_time()

    def _stopped_waiting(self) -> bool:
        """True if all is done; else give a sign of life after a short wait."""
        if self.done.wait(self._poll_seconds):
            return True
        self._reads += 1
        self._hearts.count_up()
        return False

    def _store_is_silent(self) -> None:
        self._finish(
            RankFailureError(
                f"the store at {meeting_point()}, through which the ranks find each other, has not "
                f"answered for silent_seconds = {self._watch.silent_seconds:g} s; the process "
                "that keeps it (torchrun, adloco train --ranks, or rank 0) is stopped, or its "
                "machine or link is down"
            )
        )

    def _finish(self, error: OtherRankError) -> None:
        """End the process, unless the main thread notices by itself in time."""
        seconds = GRACE_SECONDS
        if isinstance(error, RankFailureError):
            seconds = min(seconds, self._watch.silent_seconds / BEATS)
        if not self.done.wait(seconds):
            self._watch.end(error)


class Silence:
    """Counts the looks in a row that have found a counter unchanged."""

    def __init__(self, looks: int = BEATS) -> None:
        self._looks = looks
        self._counts: dict[int, int] = {}
        self._unchanged: dict[int, int] = {}

    def look(self, counts: Mapping[int, int]) -> list[int]:
        """Return the counters, by number, that so many looks in a row have found unchanged."""
        for number, count in counts.items():
            same = self._counts.get(number) == count
            self._unchanged[number] = self._unchanged.get(number, 0) + 1 if same else 0
        self._counts = dict(counts)
        return [number for number in counts if self._unchanged[number] >= self._looks]


class Heartbeats:
    """The heartbeats of all ranks in a store."""

    def __init__(self, store: Any, rank: int, num_ranks: int, silent_seconds: float) -> None:
        """silent_seconds: A rank that is silent for so long has failed."""
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._silent_seconds = silent_seconds
        self._silence = Silence()
        store.set(f"host-{rank}", socket.gethostname())

    def beat(self) -> RankFailureError | None:
        """Count up, look at the others, and return the error if one has failed.

        Called `BEATS` times in silent_seconds.
        """
        self.count_up()
        counts = {other: beats(self._store, other) for other in self._others}
        silent = self._silence.look(counts)
        for other in silent:
            self._store.set(f"silent-{other}", str(counts[other]))
        if not silent:
            return None
        return RankFailureError(
            f"{with_host(self._store, silent[0])} has given no sign of life for "
            f"silent_seconds = {self._silent_seconds:g} s; it is stopped, or its machine or link "
            "is down"
        )

    def count_up(self) -> None:
        """Give a sign of life."""
        self._store.add(f"beats-{self._rank}", 1)


def beats(store: Any, rank: int) -> int:
    """Count the signs of life of a rank."""
    return int(store.add(f"beats-{rank}", 0))


def known_silent(store: Any, rank: int) -> bool:
    """True if another rank has found this one silent for silent_seconds, and it still is."""
    key = f"silent-{rank}"
    return store.check([key]) and int(store.get(key)) == beats(store, rank)


def with_host(store: Any, rank: int) -> str:
    """A rank and its machine, in words."""
    key = f"host-{rank}"
    known = store.check([key])
    host = store.get(key).decode(errors="replace") if known else "an unknown machine"
    return f"rank {rank} on {host}"


def missing_ranks(notes: Notes) -> RankFailureError | None:
    """Name the ranks that are gone, after a connection was closed; None if all give signs of
    life.
    """
    store, rank, ranks = notes.keys, notes.quorum.rank, range(len(notes.quorum.members))
    # A rank that has never given a sign of life does not give any.
    others = [each for each in ranks if each != rank and beats(store, each)]
    before = {each: beats(store, each) for each in others}
    time.sleep(SILENT_SECONDS)
    missing = [with_host(store, each) for each in others if beats(store, each) == before[each]]
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return RankFailureError(
        f"{missing[0]}{more} gave no sign of life after rank {rank} lost a connection; "
        f"{'they were' if more else 'it was'} killed or crashed, or the machine is down"
    )


def watch_progress(
    progress: Callable[[], int],
    over: threading.Event,
    silent_seconds: float,
    on_silence: Callable[[], None],
) -> None:
    """Call `on_silence` if a counter stays unchanged for silent_seconds before `over` is set.

    A thread that talks to a store cannot time itself: it waits for ever if the store is frozen.
    """
    silence = Silence()
    while not over.wait(silent_seconds / BEATS):
        if silence.look({0: progress()}):
            on_silence()
            return
