"""Starting the ranks of a run on this machine, and ending all of them when one fails.

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

from adloco.distributed.launch.failures import report_failure
from adloco.distributed.launch.signals import signals_passed_to
from adloco.errors import LostRankError

INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl+C or another signal."""
FAILING_SECONDS = 5.0
"""How long the other ranks may take to end after one has failed."""


def start_ranks(count: int, words: Sequence[str], grace_seconds: float) -> int:
    """Run `python -m adloco WORDS` on several ranks of this machine until all have ended.

    Every rank gets Ctrl+C once. After a rank has failed, the others are ended. No rank outlives
    this call.

    Args:
        count: Number of ranks.
        words: Arguments of the command.
        grace_seconds: How long the other ranks may take to end after one was interrupted; they
            save together.

    Returns:
        The exit code of the first rank that failed (1 if it was killed), or 0; INTERRUPTED after
        a signal.
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
    with signals_passed_to(lambda: ranks) as received:
        for number in range(count):
            # Each rank has its own session, so the terminal's Ctrl+C reaches only this process,
            # which passes it on once.
            numbers = {"RANK": str(number), "LOCAL_RANK": str(number)}
            environment = os.environ | shared | numbers
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "adloco", *words],
                    env=environment,
                    start_new_session=True,
                )
            )
        code = _wait(
            ranks,
            grace_seconds,
            lambda rank, number: report_failure(
                store, LostRankError(f"rank {rank} was ended by signal {number}")
            ),
        )
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


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    grace_seconds: float,
    on_killed: Callable[[int, int], None],
) -> int:
    """Wait for all ranks, and return the first failure's exit code, or 0.

    on_killed: Called with a rank and the signal that ended it. A killed rank cannot tell the others
    itself.
    """
    first_failure, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        codes = [code for code in (rank.poll() for rank in ranks) if code]
        if codes and not first_failure:
            first_failure = codes[0]
            if first_failure < 0:
                on_killed(
                    next(
                        number for number, rank in enumerate(ranks) if rank.poll() == first_failure
                    ),
                    -first_failure,
                )
            deadline = time.monotonic() + (
                grace_seconds if first_failure == INTERRUPTED else FAILING_SECONDS
            )
        time.sleep(0.05)
    codes = [code for code in (rank.poll() for rank in ranks) if code]
    return first_failure or (codes[0] if codes else 0)
