"""The keys of a run's store that say which processes train together, and which launchers live.

A process has an id: its rank at the start, or the next free number if it was started later.
`meeting.py` says how the processes find the next quorum. All stores here have the keys of this
start of the ranks (`connect`, `of_this_start`).
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from adloco.distributed.launch.rank_store import Quorum, connect, report_death

OVER = "over"
"""The key that is set when a run has ended."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The entry of a quorum at the store."""

    members: list[int]
    failed: list[int]
    """Ids of the members before that a launcher or another rank says are gone, or that gave no sign
    of life."""
    shape: list[int]
    """Shards and replicas of an island."""


def decide(store: Any, number: int, decision: Decision) -> Decision:
    """Write down who the quorum of this number is; return what was written first."""
    seen = store.compare_set(f"quorum-{number}", "", json.dumps(asdict(decision)))
    return Decision(**json.loads(seen))


def read_decision(store: Any, number: int) -> Decision:
    """Who the quorum of this number is."""
    return Decision(**json.loads(store.get(f"quorum-{number}")))


def is_decided(store: Any, number: int) -> bool:
    """True if a quorum of this number was written down."""
    return bool(store.check([f"quorum-{number}"]))


def report_end(store: Any, process: int, code: int) -> None:
    """Tell the launchers of other machines that a process has ended, and its exit code."""
    store.set(f"ended-{process}", str(code))


def all_have_ended(store: Any, processes: Iterable[int]) -> bool:
    """True if the launchers of all these processes say that they have ended."""
    return bool(store.check([f"ended-{process}" for process in processes]))


def end_codes(store: Any, processes: Iterable[int]) -> list[int]:
    """The exit codes of processes that have all ended."""
    return [int(store.get(f"ended-{process}")) for process in processes]


def report_start(store: Any, process: int, launcher: int) -> None:
    """Tell all which launcher ends a process if it is taken for failed."""
    store.set(f"launcher-of-{process}", str(launcher))


def beat_as_launcher(store: Any, launcher: int) -> None:
    """Give a sign of life of a launcher."""
    store.add(f"launcher-beats-{launcher}", 1)


def beats_of_launcher(store: Any, process: int) -> int:
    """Count the signs of life of the launcher that ends this process if it is taken for
    failed; 0: there is none.
    """
    key = f"launcher-of-{process}"
    return store.add(f"launcher-beats-{int(store.get(key))}", 0) if store.check([key]) else 0


def end_all(quorum: Quorum) -> None:
    """Tell processes that wait to join that the run has ended; called by its members."""
    if quorum.number > 0:
        connect().set(OVER, "")


def leave(quorum: Quorum) -> None:
    """Tell the others that this process ends, and that they continue."""
    report_death(connect(), quorum.process, "was told to leave")
