"""Starting the ranks of a run on this machine, and ending all of them when one fails.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adloco.distributed.launch.rank_store import (
    MEETING_POINT,
    StoreGoneError,
    local_store,
    of_this_start,
    report_death,
)
from adloco.distributed.launch.signals import signals_passed_to
from adloco.errors import RANK_FAILURE

INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl+C or another signal."""
FAILING_SECONDS = 5.0
"""Seconds that the other ranks may take to end after one has failed."""
WAIT_SECONDS = 0.05


def start_ranks(count: int, words: Sequence[str], grace_seconds: float) -> int:
    """Run `python -m adloco WORDS` on several ranks of this machine until all have ended.

    Every rank gets Ctrl+C once. No rank outlives this call.

    grace_seconds: How long the other ranks may take to end after one was interrupted; they
        save together.

    Returns:
        As `run_ranks`.
    """
    ranks = LocalRanks(local_store(), words, count, loopback())
    return run_ranks(ranks, lambda received: wait_for_all(ranks, grace_seconds))


class LocalRanks:
    """The ranks that a launcher has started on this machine."""

    def __init__(
        self,
        store: Any,
        words: Sequence[str],
        count: int,
        environment: Mapping[str, str],
        first: int = 0,
    ) -> None:
        """
        Args:
            count: How many begin here.
            environment: More variables of all ranks.
            first: Id of the first one.
        """
        self.store = of_this_start(store)
        self.by_id: dict[int, subprocess.Popen[bytes]] = {}
        self.slots: dict[int, int] = {}
        """The number of each rank's place on this machine, by its id."""
        self._first, self._count = first, count
        self._words = words
        self._shared = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            MEETING_POINT: f"{store.host}:{store.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        } | dict(environment)

    def start_all(self) -> None:
        for slot in range(self._count):
            self.start(self._first + slot, slot)

    def start(self, number: int, slot: int) -> None:
        """Start the rank with this id in this place of the machine, from 0."""
        # Each rank has its own session, so the terminal's Ctrl+C reaches only this process, which
        # passes it on once.
        own = {"RANK": str(number), "LOCAL_RANK": str(slot)}
        self.slots[number] = slot
        self.by_id[number] = subprocess.Popen(
            [sys.executable, "-m", "adloco", *self._words],
            env=os.environ | self._shared | own,
            start_new_session=True,
        )

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [*self.by_id.values()]

    def codes(self) -> dict[int, int]:
        """The exit code of each rank that has ended, by its id; negative if a signal ended it."""
        codes = {number: rank.poll() for number, rank in self.by_id.items()}
        return {number: code for number, code in codes.items() if code is not None}

    def all_ended(self) -> bool:
        return len(self.codes()) == len(self.by_id)

    def wait(self, seconds: float) -> int:
        """Wait for all ranks for a while; return the first exit code that is not 0, or
        RANK_FAILURE.
        """
        deadline = time.monotonic() + seconds
        while not self.all_ended() and time.monotonic() < deadline:
            time.sleep(WAIT_SECONDS)
        return next(filter(None, self.codes().values()), RANK_FAILURE)


def run_ranks(
    ranks: LocalRanks,
    wait: Callable[[Sequence[int]], int],
    unheard: Callable[[int], None] | None = None,
) -> int:
    """Start ranks, pass signals on to them, and wait until they have ended.

    Args:
        ranks: None has been started yet.
        wait: Waits for them, and returns an exit code, negative after a signal. It is called with
            the signals that this process gets.
        unheard: As in `signals_passed_to`.

    Returns:
        That exit code, RANK_FAILURE if it is negative or the store is gone; INTERRUPTED instead
        if it is not 0 and this process got a signal.
    """
    with signals_passed_to(ranks.processes, unheard) as received:
        ranks.start_all()
        try:
            code = wait(received)
        except StoreGoneError:
            # The ranks notice by themselves that the store is gone, and say so.
            code = ranks.wait(FAILING_SECONDS)
        return INTERRUPTED if code and received else RANK_FAILURE if code < 0 else code


def wait_for_all(ranks: LocalRanks, grace_seconds: float) -> int:
    """Wait for all ranks, and return the first failure's exit code, or 0.

    grace_seconds: As in `start_ranks`.
    """
    first_failure, deadline = 0, float("inf")
    while not ranks.all_ended() and time.monotonic() < deadline:
        failed = [(number, code) for number, code in ranks.codes().items() if code]
        if failed and not first_failure:
            number, first_failure = failed[0]
            if first_failure < 0:  # A killed rank cannot tell the others itself.
                report_death(ranks.store, number, ended_by(-first_failure))
            deadline = time.monotonic() + (
                grace_seconds if first_failure == INTERRUPTED else FAILING_SECONDS
            )
        time.sleep(WAIT_SECONDS)
    return first_failure or next(filter(None, ranks.codes().values()), 0)


def ended_by(number: int) -> str:
    """The end of a sentence about a process that a signal has ended."""
    return f"was ended by signal {number}"


def loopback() -> dict[str, str]:
    """The variables that let gloo and NCCL listen on the loopback interface only."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {
        variable: name
        for name in names
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
