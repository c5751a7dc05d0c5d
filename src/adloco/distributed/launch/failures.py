"""Failures of ranks: if one rank fails, all ranks end within seconds and report its message.

The first failure is written to the store at which the ranks met. A rank that waits for a lost one
gets an error about the connection from its backend (gloo at once, NCCL late or never) and reads the
message from the store instead. A thread also reads the store every half second, for ranks that
still wait or compute.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adloco.errors import OtherRankError

KEY = "failure"
POLL_SECONDS, GRACE_SECONDS = 0.5, 2.0
LONGEST = 1000
"""Characters of a message that are shown."""
LOST = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|socket", re.IGNORECASE)


@contextmanager
def shared_failures(end: Callable[[str], None] | None) -> Iterator[None]:
    """Share the failures of ranks while the work inside runs.

    Args:
        end: Called from a thread with the message if another rank failed and this one does not
            notice by itself. It must end the process.

    Raises:
        OtherRankError: Another rank failed first; it has that rank's message.
    """
    store, rank = _connect(), dist.get_rank()
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done, end), daemon=True) if end else None
    if watch:
        watch.start()
    try:
        yield
    except Exception as error:
        first = _first(store, rank, error)
        if first is not None:
            raise OtherRankError(first) from None
        raise
    finally:
        done.set()
        if watch:
            watch.join()


def report_failure(store: Any, message: str) -> None:
    """Tell all ranks of a failure, unless they know of an earlier one.

    Args:
        store: The store of the process that started the ranks.
        message: What failed.
    """
    dist.PrefixStore("adloco-0", store).compare_set(KEY, "", readable(message))  # type: ignore[attr-defined]


def readable(message: str | bytes) -> str:
    """One line of the message, cut in length and without control characters.

    What other ranks wrote is shown in a terminal, which obeys control characters.
    """
    text = message.decode(errors="replace") if isinstance(message, bytes) else message
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def _connect() -> Any:
    """A new connection to the store at which torchrun (or `start_ranks`) let the ranks meet."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    timeout = timedelta(seconds=20)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"adloco-{attempt}", store)  # type: ignore[attr-defined]


def _first(store: Any, rank: int, error: Exception) -> str | None:
    """Return the first failure if it was another rank's, else write this rank's to the store."""
    # gloo raises plain RuntimeErrors; classes derived from RuntimeError have their own messages.
    lost = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and LOST.search(str(error)) is not None
    )
    if isinstance(error, OtherRankError):
        return str(error)
    try:
        if lost:
            return (
                readable(store.get(KEY))
                if store.check([KEY])
                else f"rank {rank} lost the connection to another rank, which was killed or crashed"
            )
        mine = readable(f"rank {rank}: {error}")
        seen = readable(store.compare_set(KEY, "", mine))
    except RuntimeError:  # The store ended with the process that kept it.
        return None
    return None if seen == mine else seen


def _watch(done: threading.Event, end: Callable[[str], None]) -> None:
    try:
        store = _connect()
        while not done.wait(POLL_SECONDS):
            if store.check([KEY]):
                # Read before waiting, because the store ends with the process that keeps it.
                first = readable(store.get(KEY))
                if not done.wait(GRACE_SECONDS):
                    end(first)
                return
    except RuntimeError:
        # The store is gone: either the run has just ended, or the process that started the ranks
        # has ended too early.
        if not done.wait(GRACE_SECONDS):
            end("the process that started the ranks is gone")
