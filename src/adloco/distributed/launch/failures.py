"""Failures of ranks: if one rank fails, all others hear of it.

The first failure is written to the store at which the ranks met. A rank that waits for a failed one
gets an error about the connection from its backend (gloo at once, NCCL late or never) and reads the
message from the store instead. Ranks that are stopped or frozen close no connection: a watch, which
`process_group` may be given, notices them (elastic/watch.py).
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from adloco.distributed.launch.rank_store import Quorum, connect, meeting_point
from adloco.errors import OtherRankError, RankFailureError

KEY, OF_RANK = "failure", "rank-failure"
"""Key of the first failure at the store; the word before its message if a rank has failed."""
TOLD_SECONDS, MEET_SECONDS = 0.5, 0.02
"""Seconds to wait for what others know of a closed connection; seconds between two looks for ranks
that are late.
"""
LONGEST = 1000
"""Characters of a message that are shown."""
CLOSED = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|socket", re.IGNORECASE)
LATE = re.compile(r"timed out|timeout", re.IGNORECASE)


class Notes:
    """Notes at the store about failures in a quorum."""

    def __init__(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self._store = connect()
        self.keys = quorum.keys(self._store)
        self._deaths = 0

    def first(self) -> OtherRankError | None:
        """The first failure; None so far."""
        # A launcher writes deaths, and knows nothing of quorums.
        deaths = self._store.add("deaths", 0)
        if deaths != self._deaths:
            self._deaths = deaths
            for rank, member in enumerate(self.quorum.members):
                if self._store.check([f"dead-{member}"]):
                    how = self._store.get(f"dead-{member}").decode(errors="replace")
                    return self.add(RankFailureError(f"rank {rank} {how}"))
        return read_error(self.keys.get(KEY)) if self.keys.check([KEY]) else None

    def add(self, error: Exception) -> OtherRankError | None:
        """Write a failure down unless there is one; return the first one, but not to the rank whose
        own error it is.
        """
        kind = OF_RANK if isinstance(error, RankFailureError) else "error"
        mine = f"{kind} {readable(str(error))}"
        seen = self.keys.compare_set(KEY, "", mine)
        ours = seen.decode(errors="replace") == mine and not isinstance(error, RankFailureError)
        return None if ours else read_error(seen)


Explain = Callable[[Exception], OtherRankError | None]
"""Finds out which rank has failed, after a connection was closed with this error."""
Watch = Callable[[Notes], AbstractContextManager[Explain]]
"""Notices, while its context is open, failures of ranks that close no connection."""


@contextmanager
def shared_failures(quorum: Quorum, watch: Watch | None) -> Iterator[None]:
    """Share the failures of ranks while the work inside runs.

    watch: Notices ranks that are stopped or cut off; None: only the longest wait of a
        collective does.

    Raises:
        RankFailureError: Another rank was killed, stopped or cut off.
        OtherRankError: Another rank failed first; it has that rank's message.
    """
    notes = Notes(quorum)
    by_hand = nullcontext(lambda error: cut_off(quorum.rank, error))
    with watch(notes) if watch else by_hand as explain:
        try:
            yield
        except Exception as error:
            first = _first(notes, error, explain)
            if first is not None:
                raise first from None
            raise


def wait_for_members(quorum: Quorum, timeout_seconds: float) -> None:
    """Wait until all ranks of a quorum are here to form a process group.

    Raises:
        RankFailureError: A rank was killed on its way here, or does not come.
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
            raise RankFailureError(
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
    kind, _, message = written.decode(errors="replace").partition(" ")
    return (RankFailureError if kind == OF_RANK else OtherRankError)(readable(message))


def is_late(error: Exception) -> bool:
    """True if the backend has waited too long, rather than seen a closed connection."""
    return LATE.search(str(error)) is not None


def cut_off(rank: int, error: Exception) -> RankFailureError:
    """The failure that this rank derives from an error of its backend alone."""
    if is_late(error):
        return RankFailureError(
            f"rank {rank} has waited too long for a rank that lives but does not come; raise "
            "timeout_seconds if a rank may be that slow"
        )
    return RankFailureError(
        f"rank {rank} lost the connection to another rank, which was killed or crashed "
        f"({readable(str(error))})"
    )


def _first(notes: Notes, error: Exception, explain: Explain) -> OtherRankError | None:
    """Return the first failure if it was another rank's, else write this rank's to the store."""
    if isinstance(error, OtherRankError):
        return error
    # gloo raises plain RuntimeErrors; classes derived from RuntimeError have their own messages.
    closed = isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and CLOSED.search(str(error)) is not None
    )
    rank = notes.quorum.rank
    try:
        if not closed:
            return notes.add(RuntimeError(f"rank {rank}: {error}"))
        return _told(notes) or explain(error)
    except RuntimeError:  # The store ended with the process that kept it.
        if not closed:
            return None
        host = meeting_point().rpartition(":")[0]
        return RankFailureError(
            f"rank {rank} lost the connection to {host}, where the store of the run was "
            "kept; rank 0 or the launcher there was killed or crashed"
        )


def _told(notes: Notes) -> OtherRankError | None:
    """The failure that a launcher or another rank reports for a closed connection; None if nobody
    reports one soon. It says more than is known here.
    """
    deadline = time.monotonic() + TOLD_SECONDS
    while (first := notes.first()) is None and time.monotonic() < deadline:
        time.sleep(TOLD_SECONDS / 10)
    return first
