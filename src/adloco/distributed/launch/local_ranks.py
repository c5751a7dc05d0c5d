"""Starting the ranks of a run on this machine, and ending all of them when one fails; or starting
another one in its place, if the others go on.

torch's elastic launcher (tried with 2.13) does this too. It is not used here, because a wrong
setting ends there in 46 lines with a traceback of the launcher, where `--ranks` prints one
sentence, and takes twice as long (reproduce/LOG.md). A restart would also repeat the same command,
where ranks that ran out of memory have to start again with smaller micro-batches.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.heartbeats import BEATS, START_SECONDS, beats
from adloco.distributed.launch.quorum import (
    all_have_ended,
    beat_as_launcher,
    end_codes,
    later_quorums,
    quorum_keys,
    report_death,
    report_end,
    report_start,
)
from adloco.distributed.launch.rendezvous import Rendezvous, on_this_machine
from adloco.distributed.launch.restarts import of_this_start
from adloco.distributed.launch.signals import signals_passed_to
from adloco.errors import LOST

INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl+C or another signal."""
FAILING_SECONDS = 5.0
"""How long the other ranks may take to end after one has failed."""
WAIT_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What becomes of a run whose ranks go on without a lost one."""

    timeout_seconds: float
    """If no rank that trains gives a sign of life for twice as long, there is nobody to go on, and
    all are ended.
    """
    replaces: Callable[[], bool] | None = None
    """Called after a rank was lost; True to start another one. None: none is started."""


def start_ranks(
    count: int,
    words: Sequence[str],
    grace_seconds: float,
    *,
    losses: Losses | None = None,
    meets: Callable[[], Rendezvous] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `python -m adloco WORDS` on several ranks of this machine until all have ended.

    Every rank gets Ctrl+C once. No rank outlives this call.

    Args:
        count: Number of ranks.
        words: Arguments of the command.
        grace_seconds: How long the other ranks may take to end after one was interrupted; they
            save together.
        losses: Says what happens if a killed rank is a matter of the others, which go on without
            it; None: they are ended, as they are after a failure.
        meets: Meets the launchers of other machines; None: there are none.
        environment: Variables of the ranks; None: those that keep them to the loopback interface.

    Returns:
        The exit code of the first rank that failed (1 if it was killed), or 0; INTERRUPTED after
        a signal; LOST if the launcher that kept the store is gone. Ranks without which the others
        went on do not count.

    Raises:
        LostRankError: The launchers of other machines did not come.
    """
    place = meets() if meets else on_this_machine(count)
    ranks = _Ranks(place, words, count, _loopback() if environment is None else environment)
    code = LOST
    try:
        with signals_passed_to(ranks.processes) as received:
            ranks.start_all()
            try:
                if losses:
                    code = _wait_for_those_left(ranks, losses, lambda: bool(received))
                else:
                    code = _wait(ranks, grace_seconds)
            except dist.DistError:
                # The ranks notice by themselves that the store is gone, and say so.
                code = ranks.wait(FAILING_SECONDS) or LOST
            return INTERRUPTED if code and received else LOST if code < 0 else code
    finally:
        if code == LOST and not losses and not place.keeps_store:
            place.wait_for_end()
        place.end()


class _Ranks:
    """The ranks that this launcher has started."""

    def __init__(
        self, place: Rendezvous, words: Sequence[str], count: int, environment: Mapping[str, str]
    ) -> None:
        self.place = place
        self.by_id: dict[int, subprocess.Popen[bytes]] = {}
        self._words = words
        self._count = count
        self._slots: dict[int, int] = {}
        """The number of each rank's place on this machine, by its id."""
        self._shared = dict(environment) | {
            "MASTER_ADDR": place.store.host,
            "MASTER_PORT": str(place.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(place.world),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": str(place.launcher),
            "GROUP_WORLD_SIZE": str(place.machines),
            "OMP_NUM_THREADS": "1",
        }

    def start_all(self) -> None:
        for slot in range(self._count):
            self._start(self.place.first + slot, slot)

    def replace(self, lost: int) -> None:
        """Start another rank in the place of a lost one."""
        self._start(self.place.next_process(), self._slots[lost])

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [*self.by_id.values()]

    def codes(self) -> dict[int, int]:
        """The exit code of each rank that has ended, by its id; negative if a signal ended it."""
        codes = {number: rank.poll() for number, rank in self.by_id.items()}
        return {number: code for number, code in codes.items() if code is not None}

    def all_ended(self) -> bool:
        return len(self.codes()) == len(self.by_id)

    def kill(self, ids: Iterable[int]) -> None:
        """Kill those of the ranks with these ids that are here."""
        for number in {*ids} & {*self.by_id}:
            self.by_id[number].kill()

    def wait(self, seconds: float) -> int:
        """Wait for all ranks for a while; return the first exit code that is not 0, or 0."""
        deadline = time.monotonic() + seconds
        while not self.all_ended() and time.monotonic() < deadline:
            time.sleep(WAIT_SECONDS)
        return next(filter(None, self.codes().values()), 0 if self.all_ended() else LOST)

    def _start(self, number: int, slot: int) -> None:
        # Each rank has its own session, so the terminal's Ctrl+C reaches only this process, which
        # passes it on once.
        self._slots[number] = slot
        report_start(self.place.store, number, self.place.launcher)
        self.by_id[number] = subprocess.Popen(
            [sys.executable, "-m", "adloco", *self._words],
            env=os.environ | self._shared | {"RANK": str(number), "LOCAL_RANK": str(slot)},
            start_new_session=True,
        )


def _loopback() -> dict[str, str]:
    """The variables that let gloo and NCCL listen on the loopback interface only."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {
        variable: name
        for name in names
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }


def _wait(ranks: _Ranks, grace_seconds: float) -> int:
    """Wait for all ranks, and return the first failure's exit code, or 0."""
    first_failure, deadline = 0, float("inf")
    while not ranks.all_ended() and time.monotonic() < deadline:
        failed = [(number, code) for number, code in ranks.codes().items() if code]
        if failed and not first_failure:
            number, first_failure = failed[0]
            if first_failure < 0:  # A killed rank cannot tell the others itself.
                report_death(ranks.place.store, number, _ended_by(-first_failure))
            deadline = time.monotonic() + (
                grace_seconds if first_failure == INTERRUPTED else FAILING_SECONDS
            )
        time.sleep(WAIT_SECONDS)
    return first_failure or next(filter(None, ranks.codes().values()), 0)


def _wait_for_those_left(ranks: _Ranks, losses: Losses, stopping: Callable[[], bool]) -> int:
    """Wait for all ranks, those included that are started in the place of lost ones.

    Args:
        ranks: Those of this machine.
        losses: What becomes of lost ones.
        stopping: True after a signal that ends the run.

    Returns:
        The exit code of a rank that failed, 0 if one ended the run, else that of the last one.
    """
    store = ranks.place.store
    members, quorums = list(range(ranks.place.world)), 0
    ended, deadline = dict[int, int](), float("inf")
    silent = _AllSilent(store, losses.timeout_seconds)
    over = False
    while not over and time.monotonic() < deadline:
        beat_as_launcher(store, ranks.place.launcher)
        for quorum in later_quorums(store, quorums):
            quorums, members, deadline = quorums + 1, quorum.members, float("inf")
            ranks.kill(quorum.lost)
        if silent.look(quorums, len(members)):
            ranks.kill(members)
        for process, code in ranks.codes().items():
            if process in ended:
                continue
            ended[process] = code
            report_end(store, process, code)
            if code == 0:
                continue
            # A member that ends because another one is lost does not go on without it, nor do the
            # others; one that is stopped would never end.
            gives_up = code == LOST and process in members
            if gives_up or (code > 0 and code not in (LOST, INTERRUPTED)):
                deadline = min(deadline, time.monotonic() + FAILING_SECONDS)
                continue
            report_death(store, process, _ended_by(-code) if code < 0 else "has left")
            left = not all_have_ended(store, members)
            if losses.replaces and left and not stopping() and losses.replaces():
                ranks.replace(process)
        # Those that wait to join end with the members.
        over = len(ended) == len(ranks.by_id) or all_have_ended(store, members)
        time.sleep(WAIT_SECONDS)
    # A machine whose ranks all still wait to join ends as the members do.
    codes = [*ended.values()] or end_codes(store, members)
    failed = [code for code in codes if code > 0 and code not in (LOST, INTERRUPTED)]
    return failed[0] if failed else 0 if 0 in codes else codes[-1]


class _AllSilent:
    """Notices that all members of a quorum are stopped, so that no rank can notice it."""

    def __init__(self, store: Any, timeout_seconds: float) -> None:
        self._store = of_this_start(store)
        self._between = timeout_seconds / BEATS
        """Seconds from one look to the next."""
        self._next = time.monotonic()
        self._seen = list[int]()
        self._unchanged = 0.0

    def look(self, quorum: int, members: int) -> bool:
        """True if no member has given a sign of life for twice timeout_seconds; called again and
        again.

        Args:
            quorum: Its number.
            members: How many it has.
        """
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._between
        keys = quorum_keys(self._store, quorum)
        counts = [quorum, *(beats(keys, rank) for rank in range(members))]
        self._unchanged = self._unchanged + self._between if counts == self._seen else 0.0
        self._seen = counts
        # Members that have not given any sign yet may still be starting.
        patience = 2 * BEATS * self._between + (0.0 if all(counts[1:]) else START_SECONDS)
        return self._unchanged >= patience


def _ended_by(number: int) -> str:
    return f"was ended by signal {number}"
