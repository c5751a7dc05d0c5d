"""Starts the ranks of one machine of a run whose ranks recover, or that has several machines, and
another rank in the place of one that has failed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco.distributed.launch.launcher import START_SECONDS
from adloco.distributed.launch.local_ranks import (
    FAILING_SECONDS,
    WAIT_SECONDS,
    LocalRanks,
    ended_by,
    loopback,
    run_ranks,
    wait_for_all,
)
from adloco.distributed.launch.rank_store import quorum_keys, report_death
from adloco.elastic.machines import Rendezvous, on_this_machine
from adloco.elastic.membership import TABLE, Action, Seen, State, seen_by_launcher
from adloco.elastic.store import (
    Decision,
    all_have_ended,
    beat_as_launcher,
    end_codes,
    is_decided,
    read_decision,
    report_end,
    report_start,
)
from adloco.elastic.watch import BEATS, beats
from adloco.errors import RANK_FAILURE


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The settings of a run whose ranks recover from the failure of one."""

    silent_seconds: float
    """If no rank that trains gives a sign of life for twice as long, there is nobody to recover,
    and all are ended.
    """
    timeout_seconds: float
    """Time that ranks may take to start, in which none gives a sign of life."""
    replaces: Callable[[], bool] | None = None
    """Called after a rank failed; True to start another one. None: none is started."""


def start_ranks(
    count: int,
    words: Sequence[str],
    grace_seconds: float,
    *,
    recovery: Recovery | None = None,
    rendezvous: Callable[[], Rendezvous] | None = None,
    environment: Mapping[str, str] | None = None,
    unheard: Callable[[int], None] | None = None,
) -> int:
    """Start ranks that recover, or that have others elsewhere, as `local_ranks.start_ranks` does.

    Args:
        recovery: Says what happens after a rank has failed, if the others recover; None: all are
            ended.
        rendezvous: Meets the launchers of other machines; None: there are none.
        environment: Variables of the ranks; None: those that keep them to the loopback interface.
        unheard: Called with a signal that came while this launcher waited for a store that does
            not answer, after its ranks have ended; it must end this process.

    Returns:
        As `local_ranks.start_ranks`. Ranks without which the others continued do not count.

    Raises:
        RankFailureError: The launchers of other machines did not come.
    """
    place = rendezvous() if rendezvous else on_this_machine(count)
    shared = {
        "WORLD_SIZE": str(place.world),
        "GROUP_RANK": str(place.machine),
        "GROUP_WORLD_SIZE": str(place.machines),
    }
    own = loopback() if environment is None else dict(environment)
    ranks = LocalRanks(place.store, words, count, own | shared, place.first)
    launcher = _Launcher(place, ranks, recovery) if recovery else None
    code = RANK_FAILURE
    try:
        code = run_ranks(
            ranks,
            launcher.wait if launcher else lambda _: wait_for_all(ranks, grace_seconds),
            unheard,
        )
    finally:
        if code == RANK_FAILURE and not recovery and not place.keeps_store:
            place.wait_for_end()
        place.end()
    return code


class _Launcher:
    """Waits for the ranks of this machine, those included that are started later."""

    def __init__(self, place: Rendezvous, ranks: LocalRanks, recovery: Recovery) -> None:
        self._place, self._ranks, self._recovery = place, ranks, recovery
        self._store = ranks.store
        self._newest = Decision(members=[*range(place.world)], failed=[], shape=[])
        self._number = 0
        """The number of the newest quorum."""
        self._ended: dict[int, int] = {}
        """Exit codes of ranks, by id, in the order in which they were seen."""
        self._deadline = float("inf")
        """Time at which all ranks are ended."""

    def wait(self, received: Sequence[int]) -> int:
        """Wait for all ranks.

        received: Signals that end the run, as they come.

        Returns:
            The exit code of a rank that failed by itself, 0 if one ended the run, else that of the
            last one.
        """
        for process in self._ranks.by_id:
            report_start(self._store, process, self._place.launcher)
        silent = _AllSilent(self._store, self._recovery)
        over = False
        while not over and time.monotonic() < self._deadline:
            beat_as_launcher(self._store, self._place.launcher)
            while is_decided(self._store, self._number + 1):
                self._number += 1
                self._newest = read_decision(self._store, self._number)
                self._deadline = float("inf")
                for process in self._newest.failed:
                    self._act(process, Seen.LEFT_OUT)
            if silent.look(self._number, len(self._newest.members)):
                self._kill(self._newest.members)
            for process, code in self._ranks.codes().items():
                if process not in self._ended:
                    self._ended[process] = code
                    report_end(self._store, process, code)
                    self._act(process, seen_by_launcher(code), code, ends=bool(received))
            # Those that wait to join end with the members.
            over = len(self._ended) == len(self._ranks.by_id)
            over = over or all_have_ended(self._store, self._newest.members)
            time.sleep(WAIT_SECONDS)
        codes, members = [*self._ended.values()], self._newest.members
        errors = [code for code in codes if seen_by_launcher(code) is Seen.ERROR]
        # A machine whose ranks were all left out, or still wait to join, ends as the members do.
        if not {*members} & {*self._ended} and all_have_ended(self._store, members):
            codes = end_codes(self._store, members)
        return errors[0] if errors else 0 if 0 in codes else codes[-1]

    def _act(self, process: int, seen: Seen, code: int = 0, *, ends: bool = False) -> None:
        """Do what the table says of a rank.

        Args:
            code: Its exit code, if it has ended.
            ends: True if a signal ends the run.
        """
        action = TABLE[self._state(process), seen].action
        if seen is Seen.ERROR:  # The others may wait for it to form a group.
            report_death(self._store, process, f"has ended with exit code {code}")
        if action is Action.END_ALL:
            # Those that are stopped would never end by themselves.
            self._deadline = min(self._deadline, time.monotonic() + FAILING_SECONDS)
        elif action is Action.EXPEL:
            self._kill([process])
        elif action is Action.REPLACE:
            report_death(self._store, process, ended_by(-code) if code < 0 else "has left")
            if not ends:
                self._replace(process)

    def _replace(self, process: int) -> None:
        """Start another rank in the place of one that has ended, if the run is to have one."""
        replaces = self._recovery.replaces
        left = not all_have_ended(self._store, self._newest.members)
        if replaces and left and replaces():
            number = self._place.next_process()
            report_start(self._store, number, self._place.launcher)
            self._ranks.start(number, self._ranks.slots[process])

    def _state(self, process: int) -> State:
        """The state of a rank so far. One that waits at a meeting is taken for training."""
        if process in self._newest.members:
            return State.TRAINING
        return State.SILENT if process in self._newest.failed else State.JOINING

    def _kill(self, processes: Sequence[int]) -> None:
        """Kill those of these processes that are here."""
        for process in {*processes} & {*self._ranks.by_id}:
            self._ranks.by_id[process].kill()


class _AllSilent:
    """Notices that all members of a quorum are stopped, so that no rank can notice it."""

    def __init__(self, store: Any, recovery: Recovery) -> None:
        self._store = store
        self._silent = 2 * recovery.silent_seconds
        self._starting = max(self._silent, recovery.timeout_seconds) + START_SECONDS
        self._between = recovery.silent_seconds / BEATS
        """Seconds from one look to the next."""
        self._next = time.monotonic()
        self._seen = list[int]()
        self._unchanged = 0.0

    def look(self, quorum: int, members: int) -> bool:
        """True if no member has given a sign of life for twice silent_seconds; called again and
        again.
        """
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._between
        keys = quorum_keys(self._store, quorum)
        counts = [quorum, *(beats(keys, rank) for rank in range(members))]
        self._unchanged = self._unchanged + self._between if counts == self._seen else 0.0
        self._seen = counts
        # Members that have not given any sign yet may still be starting.
        return self._unchanged >= (self._silent if all(counts[1:]) else self._starting)
