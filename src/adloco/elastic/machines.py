"""The meeting point of the launchers of a run: each starts the ranks of its machine, and all use
one store.

The launcher on the machine whose address is given keeps the store, so the run ends with it. The
first ones to come begin the run together. One that comes later, or comes back, starts ranks that
ask to join (`meeting.py`).

torchrun's agents share a store as well, but start all ranks again when a machine comes or goes, and
wait five minutes at the end of a run for one that has failed (seen with torch 2.13).

If the run has a secret, the others reach the store through a door (`door.py`), where each of their
connections proves it.
"""

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from adloco.distributed.launch.rank_store import (
    CONNECT_SECONDS,
    StoreGoneError,
    kept_store,
    local_store,
    store_at,
)
from adloco.elastic.door import Relay, open_door, open_tunnel
from adloco.elastic.meeting import LAUNCHER_SECONDS
from adloco.elastic.secret import AnotherSecretError, NoDoorError, asks_for_proof
from adloco.elastic.watch import Silence
from adloco.errors import RankFailureError, require

OPEN, BEGIN, CLOSING = "open", "begin", "closing"
LAUNCHERS, PROCESSES = "launchers", "processes"
LOOK_SECONDS = 0.2
END_SECONDS = 5.0
"""Seconds that the launcher with the store waits for the others at the end."""

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A launcher's place among those of a run."""

    store: Any
    """The store that the launcher and its ranks use. If this launcher keeps it, it is closed when
    this object is gone.
    """
    keeps_store: bool
    launcher: int
    """Number of this launcher, from 0."""
    machine: int
    """Number of this machine among those that begin the run; of one that comes later, a larger one.
    """
    first: int
    """Id of the first rank that it starts; those of the others follow."""
    machines: int
    """Launchers that begin the run together."""
    world: int
    """Ranks that begin the run together. Those with larger ids ask to join."""
    relay: Relay | None = None
    """The door of this launcher, or its tunnel; None: the run has no secret, or one machine."""

    def next_process(self) -> int:
        """The id of a rank that is started later."""
        return int(self.store.add(PROCESSES, 1)) - 1

    def end(self) -> None:
        """Say that this launcher has ended. The one that keeps the store waits for the others."""
        try:
            self.store.set(_ended(self.launcher), "")
            if self.keeps_store:
                self.store.set(CLOSING, "")
                _look_until(self._all_ended, END_SECONDS)
        except StoreGoneError:  # The store has ended before.
            return
        finally:
            if self.relay:
                self.relay.close()

    def wait_for_end(self) -> None:
        """Wait until the store closes, so that what comes next is another start of the run."""
        with suppress(StoreGoneError):
            _look_until(lambda: self.store.check([CLOSING]), 2 * END_SECONDS)

    def _all_ended(self) -> bool:
        count = self.store.add(LAUNCHERS, 0)
        return all(self.store.check([_ended(launcher)]) for launcher in range(count))


def on_this_machine(count: int) -> Rendezvous:
    """The place of a launcher that is alone, with a store that only this machine reaches.

    count: Ranks that it starts.
    """
    return _enter(local_store(), None, True, 1, count, 0.0)


def on_machines(
    address: tuple[str, int], machines: int, count: int, seconds: float, secret: bytes = b""
) -> Rendezvous:
    """The place of a launcher among those of several machines.

    Args:
        address: Host and port at which they meet; the launcher on that host keeps the store.
        machines: Launchers that begin the run together.
        count: Ranks that this one starts.
        seconds: How long to wait for the others.
        secret: The secret of the run, which the others must prove; empty: there is none.

    Raises:
        ValueError: That address cannot be used, or this machine has not the secret of the others.
        RankFailureError: The others did not come, or the launcher with the store has ended.
    """
    try:
        listening = socket.create_server(address)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise ValueError(
                f"{_text(address)} cannot be used to meet ({error.strerror}); give the address of "
                "the first machine and a free port"
            ) from error
        store, relay = _found_store(address, seconds, secret)
        keeps = False
    else:
        store = local_store() if secret else kept_store(listening)
        relay = open_door(listening, (store.host, store.port), secret) if secret else None
        keeps = True
    with ExitStack() as if_alone:
        if relay:
            if_alone.callback(relay.close)
        try:
            place = _enter(store, relay, keeps, machines, count, seconds)
        except StoreGoneError:
            raise RankFailureError(
                f"the launcher at {_text(address)} has ended before all machines were there; start "
                "the command again on that machine, and on this one"
            ) from None
        if_alone.pop_all()
    return place


def _found_store(
    address: tuple[str, int], seconds: float, secret: bytes
) -> tuple[Any, Relay | None]:
    """The store of the launcher that keeps it, once it is there, and the tunnel to it, if there is
    a secret.
    """

    def connect() -> tuple[Any, Relay | None] | None:
        with suppress(OSError, StoreGoneError), ExitStack() as unless_found:
            tunnel = _tunnel_to(address, secret) if secret else None
            if tunnel:
                unless_found.callback(tunnel.close)
            else:
                _knock(address)
            store = _answering_store(tunnel.address if tunnel else address)
            # One that closes belongs to a start of the run that has ended.
            if store.check([OPEN]) and not store.check([CLOSING]):
                unless_found.pop_all()
                return store, tunnel
        return None

    found = _look_until(connect, seconds)
    if found is None:
        raise RankFailureError(
            f"nobody has answered at {_text(address)} within {seconds:g} s; start the command on "
            "the machine with that address too, and see that the others may connect to it"
        )
    return found


def _tunnel_to(address: tuple[str, int], secret: bytes) -> Relay:
    """A tunnel to the door at an address; ValueError if the machine there has another secret, or
    none, and OSError if nobody answers.
    """
    try:
        return open_tunnel(address, secret)
    except AnotherSecretError as error:
        raise ValueError(
            f"the machine at {_text(address)} has another secret than this one; give all machines "
            "of the run the same secret in run.secret_file"
        ) from error
    except NoDoorError as error:
        _answering_store(address)  # An error unless a store is there, which anyone may use.
        raise ValueError(
            f"the machine at {_text(address)} asks for no secret, and this one has "
            "run.secret_file; give it to all machines of the run, or to none"
        ) from error


def _answering_store(address: tuple[str, int]) -> Any:
    """The store at an address; TimeoutError if nothing is said there. torch itself would wait for
    ever for a process that is stopped, or that is no store and waits to be spoken to.
    """
    found = Future[Any]()

    def look() -> None:
        try:
            found.set_result(store_at(*address))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    return found.result(CONNECT_SECONDS)


def _knock(address: tuple[str, int]) -> None:
    """See that somebody is at an address, and asks for no secret; OSError if nobody is there."""
    began = time.monotonic()
    # torch's own attempts end up in the terminal.
    with socket.create_connection(address, CONNECT_SECONDS) as connection:
        way_seconds = time.monotonic() - began
        require(
            not asks_for_proof(connection, LOOK_SECONDS + 2 * way_seconds),
            f"the machine at {_text(address)} asks for the secret of the run; give this one the "
            "same run.secret_file",
        )


def _enter(
    store: Any, relay: Relay | None, keeps: bool, machines: int, count: int, seconds: float
) -> Rendezvous:
    """Take the next place at the store, and wait for those that begin the run.

    The launcher that keeps the store says who they are: the first to come of those that give signs
    of life. One that was started again while it waited has another number then.
    """
    launcher = int(store.add(LAUNCHERS, 1)) - 1
    store.set(_counted(launcher), str(count))
    if keeps:  # The others may come now: the first rank is here.
        store.set(OPEN, "")
    silence = Silence(round(LAUNCHER_SECONDS / LOOK_SECONDS))

    def here() -> dict[int, int]:
        """The ranks of each launcher that waits."""
        came = [each for each in range(store.add(LAUNCHERS, 0)) if store.check([_counted(each)])]
        silent = silence.look({each: store.add(_waits(each), 0) for each in came})
        return {each: int(store.get(_counted(each))) for each in came if each not in silent}

    def begun() -> bool:
        store.add(_waits(launcher), 1)
        if keeps and len(found := [*here().items()]) >= machines:
            store.add(PROCESSES, sum(ranks for _, ranks in found[:machines]))
            store.set(BEGIN, json.dumps(found[:machines]))
        return bool(store.check([BEGIN]))

    if not _look_until(begun, seconds):
        raise RankFailureError(
            f"{len(here())} of {machines} machines have come within {seconds:g} s; start the "
            "command on the others too, or give a smaller number of --machines; if the first one "
            "has completed the run (there is a summary.json in its folder), nothing is left to do"
        )
    begin = json.loads(store.get(BEGIN))
    numbers, counts = [each for each, _ in begin], [ranks for _, ranks in begin]
    begins = launcher in numbers
    machine = numbers.index(launcher) if begins else launcher
    return Rendezvous(
        store=store,
        keeps_store=keeps,
        launcher=launcher,
        machine=machine,
        first=sum(counts[:machine]) if begins else int(store.add(PROCESSES, count)) - count,
        machines=machines,
        world=sum(counts),
        relay=relay,
    )


def _look_until(look: Callable[[], Found], seconds: float) -> Found:
    """Look again and again until something true is found, or the seconds are over; return what was
    found last.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() <= deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _counted(launcher: int) -> str:
    return f"count-{launcher}"


def _waits(launcher: int) -> str:
    """The key of the signs of life of a launcher that waits for the others."""
    return f"launcher-waits-{launcher}"


def _ended(launcher: int) -> str:
    return f"launcher-ended-{launcher}"


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
