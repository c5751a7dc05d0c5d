"""When one rank fails, all end within seconds, each with the first failing rank's own message
instead of what the broken connection says.

The first failure is written to the store through which the ranks found one another. A rank that
waits for a lost one gets an error from its backend (gloo: at once; NCCL: late or never) and looks
there; a watch looks every half second, for ranks that wait or compute on.
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
LOST = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|socket", re.IGNORECASE)


@contextmanager
def shared_failures(end: Callable[[str], None] | None) -> Iterator[None]:
    """Around the work of a rank. end: called from a thread if another rank failed and this one does
    not notice by itself; must end the process.
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
    """Tell all ranks of a failure, unless another was told before. store: of whoever has started
    them.
    """
    dist.PrefixStore("adloco-0", store).compare_set(KEY, "", message)  # type: ignore[attr-defined]


def _connect() -> Any:
    """A connection of one's own to the store at which torchrun (or `start_ranks`) let the ranks
    meet.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    timeout = timedelta(seconds=20)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"adloco-{attempt}", store)  # type: ignore[attr-defined]


def _first(store: Any, rank: int, error: Exception) -> str | None:
    """The first failure if that is another rank's; otherwise this one's is written down."""
    # gloo raises plain RuntimeErrors; classes derived from it have a message of their own.
    lost = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and LOST.search(str(error)) is not None
    )
    if isinstance(error, OtherRankError):
        return str(error)
    try:
        if lost:
            return (
                store.get(KEY).decode()
                if store.check([KEY])
                else f"rank {rank} lost the connection to another rank, which was killed or crashed"
            )
        mine = f"rank {rank}: {error}"
        seen = str(store.compare_set(KEY, "", mine).decode())
    except RuntimeError:  # The store went down with the rank that kept it.
        return None
    return None if seen == mine else seen


def _watch(done: threading.Event, end: Callable[[str], None]) -> None:
    try:
        store = _connect()
        while not done.wait(POLL_SECONDS):
            if store.check([KEY]):
                first = store.get(
                    KEY
                ).decode()  # At once: the store goes down with the rank that keeps it.
                if not done.wait(GRACE_SECONDS):
                    end(first)
                return
    except (
        RuntimeError
    ):  # The store is gone, and with it whoever started the ranks, unless the run has just ended.
        if not done.wait(GRACE_SECONDS):
            end("the process that started the ranks is gone")
