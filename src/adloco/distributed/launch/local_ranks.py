"""Starting the ranks of a run on this machine, and ending all of them when one fails; or starting
another one in its place, if the others go on.

torch's elastic launcher (tried with 2.13) does this too, and torchrun is how ranks start over
several machines. For one machine it is not used: a wrong setting ends there in 46 lines with a
traceback of the launcher, where `--ranks` prints one sentence, and takes twice as long
(reproduce/LOG.md). A restart would also repeat the same command, where ranks that ran out of memory
have to start again with smaller micro-batches.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from adloco.distributed.launch.quorum import end_lost, later_quorums, report_death
from adloco.distributed.launch.signals import signals_passed_to
from adloco.errors import LOST

INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl+C or another signal."""
FAILING_SECONDS = 5.0
"""How long the other ranks may take to end after one has failed."""
WAIT_SECONDS = 0.05


def start_ranks(
    count: int,
    words: Sequence[str],
    grace_seconds: float,
    *,
    others_go_on: bool = False,
    replaces: Callable[[], bool] | None = None,
) -> int:
    """Run `python -m adloco WORDS` on several ranks of this machine until all have ended.

    Every rank gets Ctrl+C once. No rank outlives this call.

    Args:
        count: Number of ranks.
        words: Arguments of the command.
        grace_seconds: How long the other ranks may take to end after one was interrupted; they
            save together.
        others_go_on: True if a killed rank is a matter of the others, which go on without it;
            False: they are ended, as they are after a failure.
        replaces: Called after a rank was lost and the others go on; True to start another one.
            None: none is started.

    Returns:
        The exit code of the first rank that failed (1 if it was killed), or 0; INTERRUPTED after
        a signal. Ranks without which the others went on do not count.
    """
    store = _local_store()
    meeting = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **_loopback(),
    }
    shared = meeting | {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []

    def start(place: int) -> None:
        # Each rank has its own session, so the terminal's Ctrl+C reaches only this process, which
        # passes it on once.
        numbers = {"RANK": str(len(ranks)), "LOCAL_RANK": str(place)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "adloco", *words],
                env=os.environ | shared | numbers,
                start_new_session=True,
            )
        )

    with signals_passed_to(lambda: ranks) as received:
        for place in range(count):
            start(place)
        if others_go_on:
            code = _wait_for_those_left(ranks, store, start, replaces, lambda: bool(received))
        else:
            code = _wait(ranks, store, grace_seconds)
        return INTERRUPTED if code and received else 1 if code < 0 else code


def _local_store() -> Any:
    """The store at which the ranks meet; only this machine reaches it.

    This process keeps it, so that it outlives all ranks.
    """
    # By itself the store would listen on all interfaces, and whoever reaches it can end the run.
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _loopback() -> dict[str, str]:
    """The variables that let gloo and NCCL listen on the loopback interface only."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {
        variable: name
        for name in names
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], store: Any, grace_seconds: float) -> int:
    """Wait for all ranks, and return the first failure's exit code, or 0."""
    first_failure, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        failed = [(number, code) for number, code in enumerate(_codes(ranks)) if code]
        if failed and not first_failure:
            number, first_failure = failed[0]
            if first_failure < 0:  # A killed rank cannot tell the others itself.
                report_death(store, number, _ended_by(-first_failure))
            deadline = time.monotonic() + (
                grace_seconds if first_failure == INTERRUPTED else FAILING_SECONDS
            )
        time.sleep(WAIT_SECONDS)
    return first_failure or next(filter(None, _codes(ranks)), 0)


def _wait_for_those_left(
    ranks: Sequence[subprocess.Popen[bytes]],
    store: Any,
    start: Callable[[int], None],
    replaces: Callable[[], bool] | None,
    stopping: Callable[[], bool],
) -> int:
    """Wait for all ranks, those included that are started in the place of lost ones.

    Args:
        ranks: Those that have been started.
        store: Where they meet.
        start: Starts another one, given its place on this machine, and adds it to the ranks.
        replaces: True if a lost rank is to be replaced.
        stopping: True after a signal that ends the run.

    Returns:
        The exit code of a rank that failed, 0 if one ended the run, else that of the last one.
    """
    places, ended, deadline = list(range(len(ranks))), list[int](), float("inf")
    members, quorums = list(range(len(ranks))), 0
    end_lost(store)
    # Those that wait to join end with the members.
    while not {*members} <= {*ended} and time.monotonic() < deadline:
        for quorum in later_quorums(store, quorums):
            quorums, members, deadline = quorums + 1, quorum.members, float("inf")
            for process in quorum.lost:
                ranks[process].kill()
        for process, code in enumerate(_codes(ranks)):
            if code is None or process in ended:
                continue
            ended.append(process)
            if code == 0:
                continue
            # A member that ends because another one is lost does not go on without it, nor do the
            # others; one that is stopped would never end.
            gives_up = code == LOST and process in members
            if gives_up or (code > 0 and code not in (LOST, INTERRUPTED)):
                deadline = min(deadline, time.monotonic() + FAILING_SECONDS)
                continue
            report_death(store, process, _ended_by(-code) if code < 0 else "has left")
            left = any(rank.poll() is None for rank in ranks)
            if replaces and left and not stopping() and replaces():
                places.append(places[process])
                start(places[process])
        time.sleep(WAIT_SECONDS)
    codes = [ranks[process].returncode for process in ended]
    failed = [code for code in codes if code > 0 and code not in (LOST, INTERRUPTED)]
    return failed[0] if failed else 0 if 0 in codes else codes[-1]


def _codes(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit code of each rank, negative if a signal ended it; None while it runs."""
    return [rank.poll() for rank in ranks]


def _ended_by(number: int) -> str:
    return f"was ended by signal {number}"
