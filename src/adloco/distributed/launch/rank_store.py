"""The store through which the ranks of a run find each other, and hear of failures.

torchrun or `start_ranks` keeps it, or else rank 0. torch 2.13 keeps one store for all starts of the
ranks (--max-restarts), and restarted ranks would read there the addresses of those before. So each
start has keys of its own, numbered as torchrun counts restarts. It counts them on each machine by
itself, and the counts can differ: over several machines it must be told to make a new store for
each start.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adloco.errors import RankFailureError, require

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MEETING_POINT = "ADLOCO_MEETING_POINT"
"""The variable in which a launcher tells its ranks the HOST:PORT at which the run meets; the store
itself may be reached by another address.
"""
CONNECT_SECONDS = 20.0
StoreGoneError = dist.DistError
"""Error of a store whose process has ended."""


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
    """Raise RankFailureError if the launcher that keeps the store has ended; torch would try to
    reach it for half a minute.
    """
    if not store_outlives_ranks():
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except ConnectionRefusedError as error:
        raise RankFailureError("the process that started the ranks is gone") from error
    except OSError:  # A slow network, for instance: torch tries for longer.
        return


def store_outlives_ranks() -> bool:
    """True if a launcher keeps one store for all starts of the ranks; else rank 0 keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_point() -> str:
    """HOST:PORT at which the run meets, for people; the first machine has that address."""
    store = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '')}"
    return os.environ.get(MEETING_POINT, store)


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The processes that form one process group."""

    number: int = 0
    """Number of groups that the run had before, since its processes were started."""
    members: tuple[int, ...]
    """Ids of the processes, in the order of their ranks. An id is the rank at the start,
    or the next free number for a process that was started later."""
    process: int
    """Id of this process."""

    @staticmethod
    def of_all(store: Any = None) -> "Quorum":
        """The processes that were started together.

        store: Counts the groups that they had before; None: this is their first one.
        """
        members = tuple(range(int(os.environ["WORLD_SIZE"])))
        process = int(os.environ["RANK"])
        number = store.add(f"groups-{process}", 1) - 1 if store else 0
        return Quorum(number=number, members=members, process=process)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.members.index(self.process)

    def keys(self, store: Any) -> Any:
        """The store with keys that belong to this quorum."""
        return quorum_keys(store, self.number)


def quorum_keys(store: Any, number: int) -> Any:
    """The store with keys that belong to the quorum of this number."""
    return dist.PrefixStore(f"quorum-{number}", store)  # type: ignore[attr-defined]


def connect() -> Any:
    """A new connection to the store at which torchrun (or `start_ranks`) let the ranks meet.

    Raises:
        RankFailureError: The launcher that keeps it has ended.
    """
    check_store()
    return of_this_start(store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))


def store_at(host: str, port: int) -> Any:
    """A new connection to the store that another process keeps."""
    timeout = timedelta(seconds=CONNECT_SECONDS)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def kept_store(listening: socket.socket) -> Any:
    """A new store that this process keeps, at the address of a listening socket."""
    host, port = listening.getsockname()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def local_store() -> Any:
    """A new store that only this machine reaches."""
    # By itself the store would listen on all interfaces, and whoever reaches it can end the run.
    return kept_store(socket.create_server(("127.0.0.1", 0)))


def report_death(store: Any, process: int, how: str) -> None:
    """Write down that a process has ended, which it could not do itself.

    Args:
        store: With keys of this start.
        how: How it ended: the rest of a sentence about it.
    """
    store.set(f"dead-{process}", how)
    store.add("deaths", 1)
