"""Failures of ranks: if one rank fails or is lost, all others hear of it.

The first failure is written to the store at which the ranks met. A rank that waits for a lost one
gets an error about the connection from its backend (gloo at once, NCCL late or never) and reads the
message from the store instead. A thread also reads the store every half second, for ranks that
still wait or compute, and exchanges heartbeats through it.

Where the others go on without a lost rank (`on_loss`), the thread cuts this rank's connections, so
that its main thread waits for nobody, and gives signs of life until that has left the group. If it
still waits after timeout_seconds, the process is ended as one that was killed.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from adloco.distributed.launch.connections import cut_connections, open_sockets
from adloco.distributed.launch.heartbeats import (
    BEAT_SECONDS,
    BEATS,
    SILENT_SECONDS,
    Heartbeats,
    silent_ranks,
    watch_progress,
)
from adloco.distributed.launch.quorum import Quorum, connect
from adloco.errors import LostRankError, OtherRankError

KEY = "failure"
GRACE_SECONDS, MEET_SECONDS = 2.0, 0.02
IDLE = 0.05
"""A process that computes for less than this share of timeout_seconds waits for something."""
LONGEST = 1000
"""Characters of a message that are shown."""
LOST = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|socket", re.IGNORECASE)
LATE = re.compile(r"timed out|timeout", re.IGNORECASE)

End = Callable[[OtherRankError], None]


class Notes:
    """What is written at the store about failures in a quorum."""

    def __init__(self, quorum: Quorum) -> None:
        self.rank = quorum.rank
        self._members = quorum.members
        self.num_ranks = len(quorum.members)
        self._store = connect()
        self.keys = quorum.keys(self._store)
        self._deaths = 0

    def first(self) -> OtherRankError | None:
        """The first failure; None so far."""
        # A launcher writes deaths, and knows nothing of quorums.
        deaths = self._store.add("deaths", 0)
        if deaths != self._deaths:
            self._deaths = deaths
            for rank, member in enumerate(self._members):
                if self._store.check([f"dead-{member}"]):
                    how = self._store.get(f"dead-{member}").decode(errors="replace")
                    return self.add(LostRankError(f"rank {rank} {how}"))
        return read_error(self.keys.get(KEY)) if self.keys.check([KEY]) else None

    def add(self, error: Exception) -> OtherRankError | None:
        """Write a failure down, and return the first one unless it is this."""
        mine = _written(error)
        seen = self.keys.compare_set(KEY, "", mine)
        ours = seen.decode(errors="replace") == mine and not isinstance(error, LostRankError)
        return None if ours else read_error(seen)


@contextmanager
def shared_failures(
    quorum: Quorum, end: End | None, on_loss: Callable[[], None] | None, timeout_seconds: float
) -> Iterator[None]:
    """Share the failures of ranks while the work inside runs.

    Args:
        quorum: The ranks.
        end: Called from a thread with the error if another rank failed or is lost and this one
            does not notice by itself. It must end the process.
        on_loss: Called from a thread instead if a rank is lost. It should let the work inside end
            soon; the connections that the work has opened are cut. None: a loss is a failure like
            others.
        timeout_seconds: A rank that gives no sign of life for so long is lost.

    Raises:
        LostRankError: Another rank was killed, stopped or cut off.
        OtherRankError: Another rank failed first; it has that rank's message.
    """
    notes = Notes(quorum)
    done = threading.Event()
    watch = _Watch(quorum, done, end, on_loss, timeout_seconds) if end else None
    if watch:
        watch.start()
    try:
        yield
    except Exception as error:
        first = _first(notes, error, tells=on_loss is not None)
        if first is not None:
            raise first from None
        raise
    finally:
        done.set()
        if watch:
            watch.join()


def meet(quorum: Quorum, timeout_seconds: float) -> None:
    """Wait until all ranks of a quorum are here to form a process group.

    Args:
        quorum: The ranks.
        timeout_seconds: How long to wait.

    Raises:
        LostRankError: A rank was killed on its way here, or does not come.
        OtherRankError: A rank has failed on its way here.
    """
    notes, deadline = Notes(quorum), time.monotonic() + timeout_seconds
    notes.keys.set(f"here-{quorum.rank}", "")
    missing = [f"here-{rank}" for rank in range(len(quorum.members))]
    while missing := [key for key in missing if not notes.keys.check([key])]:
        failure = notes.first()
        if failure is not None:
            raise failure
        if time.monotonic() > deadline:
            raise LostRankError(
                f"rank {missing[0].removeprefix('here-')} has not come to meet the others within "
                f"{timeout_seconds:g} s; start all ranks, or look why that one is late"
            )
        time.sleep(MEET_SECONDS)


def readable(message: str) -> str:
    """One line of the message, cut in length and without control characters.

    What other ranks wrote is shown in a terminal, which obeys control characters.
    """
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def read_error(written: bytes) -> OtherRankError:
    """The error that a rank wrote to the store, whatever it wrote."""
    text = written.decode(errors="replace")
    try:
        found = json.loads(text)
        kind = LostRankError if found["lost"] is True else OtherRankError
        return kind(readable(str(found["message"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return OtherRankError(readable(text))


def _written(error: Exception) -> str:
    lost = isinstance(error, LostRankError)
    return json.dumps({"lost": lost, "message": readable(str(error))})


def _first(notes: Notes, error: Exception, *, tells: bool) -> OtherRankError | None:
    """Return the first failure if it was another rank's, else write this rank's to the store.

    tells: Write a lost connection to the store too.
    """
    if isinstance(error, OtherRankError):
        return error
    # gloo raises plain RuntimeErrors; classes derived from RuntimeError have their own messages.
    lost = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and LOST.search(str(error)) is not None
    )
    try:
        if not lost:
            return notes.add(RuntimeError(f"rank {notes.rank}: {error}"))
        if (told := _told(notes)) is not None:
            return told
        if tells or LATE.search(str(error)):
            cut_off = _cut_off(notes.rank, error)
            return notes.add(cut_off) if tells else cut_off
        return notes.add(_missing(notes))  # Before others miss this rank, which ends now.
    except RuntimeError:  # The store ended with the process that kept it.
        if not lost:
            return None
        host = os.environ["MASTER_ADDR"]
        return LostRankError(
            f"rank {notes.rank} lost the connection to {host}, where the store of the run was "
            "kept; rank 0 or the launcher there was killed or crashed"
        )


def _told(notes: Notes) -> OtherRankError | None:
    """What a launcher or another rank says of a lost connection, which is more than is known here;
    None if nobody says anything soon.
    """
    deadline = time.monotonic() + BEAT_SECONDS
    while (first := notes.first()) is None and time.monotonic() < deadline:
        time.sleep(BEAT_SECONDS / 10)
    return first


def _missing(notes: Notes) -> LostRankError:
    """Name the ranks that are gone, after a connection was lost."""
    missing = silent_ranks(
        notes.keys, notes.rank, notes.num_ranks, lambda: time.sleep(SILENT_SECONDS)
    )
    if not missing:
        return _cut_off(notes.rank, RuntimeError())
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return LostRankError(
        f"{missing[0]}{others} gave no sign of life after rank {notes.rank} lost a connection; "
        f"{'they were' if others else 'it was'} killed or crashed, or the machine is down"
    )


def _cut_off(rank: int, error: Exception) -> LostRankError:
    if LATE.search(str(error)):
        return LostRankError(
            f"rank {rank} has waited too long for a rank that lives but does not come; raise "
            "timeout_seconds if a rank may be that slow"
        )
    return LostRankError(
        f"rank {rank} lost the connection to another rank, which was killed or crashed"
    )


class _Watch(threading.Thread):
    """Reads the store and exchanges heartbeats through it, until `done` or the end."""

    def __init__(
        self,
        quorum: Quorum,
        done: threading.Event,
        end: End,
        on_loss: Callable[[], None] | None,
        timeout_seconds: float,
    ) -> None:
        super().__init__(daemon=True)
        self._quorum = quorum
        self._done = done
        self._end = end
        self._on_loss = on_loss
        self._timeout_seconds = timeout_seconds
        self._over = threading.Event()
        self._reads = 0
        self._notes = Notes(quorum)
        self._kept = open_sockets()
        """The connections that a loss leaves, this thread's own among them."""

    def run(self) -> None:
        arguments = (lambda: self._reads, self._over, self._timeout_seconds, self._store_is_silent)
        threading.Thread(target=watch_progress, args=arguments, daemon=True).start()
        try:
            self._read()
        except RuntimeError:
            # The store is gone: either the run has just ended, or the process that started the
            # ranks has ended too early.
            self._finish(OtherRankError("the process that started the ranks is gone"))
        finally:
            self._over.set()

    def _read(self) -> None:
        notes = self._notes
        hearts = Heartbeats(notes.keys, notes.rank, notes.num_ranks, self._timeout_seconds)
        poll_seconds = min(BEAT_SECONDS, self._timeout_seconds / BEATS)
        polls = max(1, round(self._timeout_seconds / BEATS / poll_seconds))
        while not self._done.wait(poll_seconds):
            self._reads += 1
            hearts.count_up()
            # What is read must be read before waiting: the store ends with the process that keeps
            # it.
            failure = notes.first()
            if failure is None and self._reads % polls == 0:
                silent = hearts.beat()
                failure = notes.add(silent) if silent else None
            if failure is not None and not self._leaves(failure):
                self._finish(failure)
                return
            if failure is not None:
                break
        # The others wait for a rank that is late at their next meeting as long as it lives.
        began, used = time.monotonic(), time.process_time()
        while not self._done.wait(poll_seconds):
            self._reads += 1
            hearts.count_up()
            if time.monotonic() - began > self._timeout_seconds:
                if time.process_time() - used < IDLE * self._timeout_seconds:
                    # A collective of gloo can miss that the lost rank has closed a connection. This
                    # rank joins the others as a new process.
                    os.kill(os.getpid(), signal.SIGKILL)
                began, used = time.monotonic(), time.process_time()

    def _leaves(self, failure: OtherRankError) -> bool:
        """True if the main thread goes on after this failure: it is told to leave the group, and
        waits for nobody in it any more.
        """
        if self._on_loss is None or not isinstance(failure, LostRankError):
            return False
        self._on_loss()
        cut_connections(self._kept)
        return True

    def _store_is_silent(self) -> None:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._finish(
            LostRankError(
                f"the store at {address}, through which the ranks find each other, has not "
                f"answered for timeout_seconds = {self._timeout_seconds:g} s; the process that "
                "keeps it (torchrun, adloco train --ranks, or rank 0) is stopped, or its machine "
                "or link is down"
            )
        )

    def _finish(self, error: OtherRankError) -> None:
        """End the process, unless the main thread notices by itself in time."""
        lost = isinstance(error, LostRankError)
        grace_seconds = min(GRACE_SECONDS, self._timeout_seconds / BEATS) if lost else GRACE_SECONDS
        if not self._done.wait(grace_seconds):
            self._end(error)
