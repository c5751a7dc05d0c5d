"""The door to a store and the tunnels to it, on loopback; the threads are those of one process."""

import errno
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from adloco.distributed.launch.rank_store import StoreGoneError, local_store, store_at
from adloco.elastic import door as doors
from adloco.elastic import secret
from adloco.elastic.door import Relay, open_door, open_tunnel
from adloco.elastic.secret import GREETING, AnotherSecretError
from tests.elastic.threads import at_once

SECRET = b"sixteen bytes ok"
SECONDS = 20.0
"""Against a test that hangs."""


@pytest.fixture
def kept() -> Any:
    return local_store()


@pytest.fixture
def door(kept: Any) -> Iterator[Relay]:
    relay = open_door(socket.create_server(("127.0.0.1", 0)), (kept.host, kept.port), SECRET)
    yield relay
    relay.close()


@pytest.fixture
def tunnel(door: Relay) -> Iterator[Relay]:
    relay = open_tunnel(door.address, SECRET)
    yield relay
    relay.close()


def connected(relay: Relay) -> socket.socket:
    return socket.create_connection(relay.address, SECONDS)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other end has closed the connection."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:  # It closed before it had read all.
        pass
    return found


def test_a_store_works_through_a_tunnel_and_a_door(kept: Any, tunnel: Relay) -> None:
    """Two processes of another machine, and the launcher that keeps the store."""
    one, two = (store_at(*tunnel.address) for _ in range(2))
    large = b"x" * 3_000_000
    one.set("large", large)
    assert kept.get("large") == two.get("large") == large
    assert [each.add("count", 1) for each in (one, two, kept)] == [1, 2, 3]
    assert one.compare_set("first", "", "one") == two.compare_set("first", "", "two") == b"one"
    waits = lambda: two.get("late")  # noqa: E731
    assert at_once(waits, lambda: kept.set("late", "it is here"))[0] == b"it is here"


def test_the_address_of_the_door_is_no_store(door: Relay) -> None:
    """What a client of torch's store sends gets no answer but the greeting."""
    with connected(door) as client:
        client.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + bytes(100))
        answer = rest(client)
    assert answer[:14] == GREETING and len(answer) == 14 + 32


def test_another_secret(door: Relay) -> None:
    with pytest.raises(AnotherSecretError):
        open_tunnel(door.address, b"another sixteen bytes")


def test_strangers_disturb_nobody(kept: Any, door: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten who say nothing, garbage, and a million bytes of it, while three may be unproven."""
    monkeypatch.setattr(doors, "MOST_UNPROVEN", 3)
    for module in (doors, secret):  # So that nobody is turned away for being slow.
        monkeypatch.setattr(module, "PROOF_SECONDS", 600)
    silent = [connected(door) for _ in range(10)]
    for words in (b"GET / HTTP/1.0\r\n\r\n".ljust(64), b"\0" * 64, GREETING + b"x" * 64):
        with connected(door) as stranger:
            stranger.sendall(words)
            assert len(rest(stranger)) <= 14 + 32 + 32
    with connected(door) as stranger:
        try:
            stranger.sendall(b"x" * 1_000_000)
        except OSError as error:
            assert error.errno in (errno.EPIPE, errno.ECONNRESET)
    guest = open_tunnel(door.address, SECRET)
    store_at(*guest.address).set("key", "of a guest")
    assert kept.get("key") == b"of a guest"
    for stranger in silent[:7]:  # Later ones took their places.
        assert len(rest(stranger)) <= len(GREETING) + 32
    for stranger in silent:
        stranger.close()
    guest.close()


def test_a_silent_stranger_is_turned_away(door: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "PROOF_SECONDS", 0.05)
    with connected(door) as stranger:
        assert len(rest(stranger)) == len(GREETING) + 32


def test_closed_ends_are_passed_on() -> None:
    """Each direction by itself; a process behind the door speaks and ends as it likes."""
    behind = socket.create_server(("127.0.0.1", 0))
    door = open_door(socket.create_server(("127.0.0.1", 0)), behind.getsockname(), SECRET)
    tunnel = open_tunnel(door.address, SECRET)

    def pair() -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection, after those by which the tunnel looks for the door."""
        outer = connected(tunnel)
        outer.sendall(b"?")
        while True:
            inner = behind.accept()[0]
            inner.settimeout(SECONDS)
            if inner.recv(1):
                return outer, inner
            inner.close()

    with behind:
        outer, inner = pair()
        with outer, inner:
            outer.sendall(b"question")
            outer.shutdown(socket.SHUT_WR)
            assert rest(inner) == b"question"
            inner.sendall(b"answer")
            inner.shutdown(socket.SHUT_WR)
            assert rest(outer) == b"answer"
        outer, inner = pair()
        with outer:
            inner.close()
            assert rest(outer) == b""
        outer, inner = pair()
        with inner:
            # Killed with bytes that it has not read: its kernel resets the connection.
            outer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            outer.close()
            assert rest(inner) == b""
    tunnel.close()
    door.close()


def test_a_tunnel_refuses_connections_once_the_door_is_gone(door: Relay, tunnel: Relay) -> None:
    """So a rank whose connection has ended hears at once that the launcher is gone."""
    with connected(tunnel) as client:
        client.sendall(b"\x00")
        door.close()
        rest(client)
        with pytest.raises(ConnectionRefusedError):
            connected(tunnel)


def test_a_client_hears_that_the_store_is_gone(door: Relay, tunnel: Relay) -> None:
    client = store_at(*tunnel.address)
    closes = threading.Timer(0.2, door.close)
    closes.start()
    with pytest.raises(StoreGoneError):
        client.wait(["never"], timedelta(seconds=SECONDS))
    closes.join()
