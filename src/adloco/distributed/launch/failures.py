"""Failures of ranks: if one rank fails or is lost, all others end and report what happened.

The first failure is written to the store at which the ranks met. A rank that waits for a lost one
gets an error about the connection from its backend (gloo at once, NCCL late or never) and reads the
message from the store instead. A thread also reads the store every half second, for ranks that
still wait or compute, and exchanges heartbeats through it.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.heartbeats import BEATS, Heartbeats, watch_progress
from adloco.distributed.launch.restarts import of_this_start
from adloco.errors import LostRankError, OtherRankError

KEY = "failure"
POLL_SECONDS, GRACE_SECONDS = 0.5, 2.0
LONGEST = 1000
"""Characters of a message that are shown."""
LOST = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|socket", re.IGNORECASE)
LATE = re.compile(r"timed out|timeout", re.IGNORECASE)

End = Callable[[OtherRankError], None]


@contextmanager
def shared_failures(end: End | None, timeout_seconds: float) -> Iterator[None]:
    """Share the failures of ranks while the work inside runs.

    Args:
        end: Called from a thread with the error if another rank failed or is lost and this one
            does not notice by itself. It must end the process.
        timeout_seconds: A rank that gives no sign of life for so long is lost.

    Raises:
        LostRankError: Another rank was killed, stopped or cut off.
        OtherRankError: Another rank failed first; it has that rank's message.
    """
    store, rank = _connect(), dist.get_rank()
    done = threading.Event()
    watch = _Watch(done, end, timeout_seconds) if end else None
    if watch:
        watch.start()
    try:
        yield
    except Exception as error:
        first = _first(store, rank, error)
        if first is not None:
            raise first from None
        raise
    finally:
        done.set()
        if watch:
            watch.join()


def report_failure(store: Any, error: Exception) -> None:
    """Tell all ranks of a failure, unless they know of an earlier one.

    Args:
        store: The store of the process that started the ranks.
        error: What failed.
    """
    of_this_start(store).compare_set(KEY, "", _written(error))


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


def _connect() -> Any:
    """A new connection to the store at which torchrun (or `start_ranks`) let the ranks meet."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=20)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return of_this_start(store)


def _first(store: Any, rank: int, error: Exception) -> OtherRankError | None:
    """Return the first failure if it was another rank's, else write this rank's to the store."""
    if isinstance(error, OtherRankError):
        return error
    # gloo raises plain RuntimeErrors; classes derived from RuntimeError have their own messages.
    lost = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and LOST.search(str(error)) is not None
    )
    try:
        if lost:
            return read_error(store.get(KEY)) if store.check([KEY]) else _cut_off(rank, error)
        mine = _written(RuntimeError(f"rank {rank}: {error}"))
        seen = store.compare_set(KEY, "", mine)
    except RuntimeError:  # The store ended with the process that kept it.
        return _cut_off(rank, error) if lost else None
    return None if seen.decode(errors="replace") == mine else read_error(seen)


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

    def __init__(self, done: threading.Event, end: End, timeout_seconds: float) -> None:
        super().__init__(daemon=True)
        self._done = done
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._over = threading.Event()
        self._reads = 0

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
        store = _connect()
        hearts = Heartbeats(store, dist.get_rank(), dist.get_world_size(), self._timeout_seconds)
        poll_seconds = min(POLL_SECONDS, self._timeout_seconds / BEATS)
        polls = max(1, round(self._timeout_seconds / BEATS / poll_seconds))
        while not self._done.wait(poll_seconds):
            self._reads += 1
            # What is read must be read before waiting: the store ends with the process that keeps
            # it.
            if store.check([KEY]):
                self._finish(read_error(store.get(KEY)))
                return
            lost = hearts.beat() if self._reads % polls == 0 else None
            if lost is not None:
                self._finish(read_error(store.compare_set(KEY, "", _written(lost))))
                return

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
