"""Ranks that torchrun starts again (--max-restarts) after one has failed.

torch 2.13 keeps one store for all starts, and restarted ranks would read there the addresses of
those before. So each start has keys of its own, numbered as torchrun counts restarts. It counts
them on each machine by itself, and the counts can differ: over several machines it must be told to
make a new store for each start.
"""

import os
import socket
from typing import Any

import torch.distributed as dist

from adloco.errors import LostRankError, require

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
CONNECT_SECONDS = 20.0


def of_this_start(store: Any) -> Any:
    """The store with keys that belong to this start of the ranks."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if store_outlives_ranks() else "0"
    return dist.PrefixStore(f"adloco-{restarts}", store)  # type: ignore[attr-defined]


def check_restarts() -> None:
    """Raise ValueError if torchrun may restart ranks over several machines with one store."""
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    require(
        not (allowed and machines > 1 and store_outlives_ranks()),
        f"torchrun --max-restarts {allowed} over {machines} machines needs {VARIABLE}=1, because "
        "restarted ranks would find the addresses of the old ones; set that variable on all "
        "machines",
    )


def check_store() -> None:
    """Raise LostRankError if the launcher that keeps the store is gone before this rank meets it.

    torch would try to reach it for as long as ranks wait for each other.
    """
    if not store_outlives_ranks():
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except ConnectionRefusedError as error:
        raise LostRankError("the process that started the ranks is gone") from error
    except OSError:  # A slow network, for instance: torch tries for longer.
        return


def store_outlives_ranks() -> bool:
    """True if a launcher keeps one store for all starts of the ranks; else rank 0 keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
