"""The way to the store of a run with a secret: a door that lets in only those who prove the secret.

The store itself listens on the loopback interface. The launcher that keeps it has a door at the
address at which the launchers meet. Each launcher on another machine has a tunnel: its store and
its ranks connect to a port of their own machine, and each of these connections is led on to the
door, with a proof of its own (`secret.py`), and from there to the store.

The bytes after the proof are passed on as they are, neither encrypted nor authenticated. A closed
connection says that a process has failed, so each end of a direction is passed on.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

from adloco.elastic.secret import PROOF_SECONDS, prove_as_door, prove_as_guest

MOST_UNPROVEN = 128
"""Guests at the door who have not proved the secret. After one more, the one that has waited
longest is turned away, so strangers who stay do not keep others out.
"""
PART_BYTES = 1 << 16
TRIES, AGAIN_SECONDS = 3, 0.1
"""Attempts to make a connection that is ended at once; seconds between two of them, and after one
could not be accepted, for instance because too many files are open.
"""

Connect = Callable[[], Awaitable[socket.socket]]
Admit = Callable[[socket.socket], Awaitable[None]]


class Relay:
    """A thread that leads each connection to a listening socket on to another address."""

    def __init__(self, listening: socket.socket, connect: Connect, admit: Admit) -> None:
        """Begin to accept connections.

        Args:
            connect: Makes the connection to which an accepted one is led on. If it is refused, the
                process at that address is gone, and nothing is accepted any more.
            admit: Called with an accepted connection first; OSError turns it away.
        """
        self.address: tuple[str, int] = listening.getsockname()
        """Host and port of the listening socket."""
        listening.setblocking(False)
        self._listening, self._connect, self._admit = listening, connect, admit
        self._loop, self._stopped = asyncio.new_event_loop(), asyncio.Event()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the connections that are left."""
        with suppress(RuntimeError):  # All have ended, and so has the loop.
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as self._connections:
            self._listen()
            try:
                await self._stopped.wait()
            finally:
                self._stop_listening()

    def _listen(self) -> None:
        if not self._stopped.is_set():
            self._loop.add_reader(self._listening, self._accept)

    def _stop_listening(self) -> None:
        if not self._stopped.is_set():
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._stopped.set()

    def _accept(self) -> None:
        try:
            near, _ = self._listening.accept()
        except OSError:
            self._loop.remove_reader(self._listening)
            self._loop.call_later(AGAIN_SECONDS, self._listen)
            return
        near.setblocking(False)
        leading = self._connections.create_task(self._lead(near))
        # A task that is cancelled before it has begun closes nothing itself.
        leading.add_done_callback(lambda _: near.close())

    async def _lead(self, near: socket.socket) -> None:
        """Lead an accepted connection on until both directions have ended."""
        with suppress(OSError):
            await self._admit(near)
            with await self._connected() as far:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_pass_on(near, far))
                    directions.create_task(self._pass_back(far, near))

    async def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        await _copy(far, near)
        # A process that sees the end connects again, and torch tries for 20 s if that is not
        # refused. So whether the other side is gone is found out before the end is passed on.
        with suppress(OSError):
            (await self._connected()).close()
        _end(near)

    async def _connected(self) -> socket.socket:
        """A new connection to the other address."""
        for _ in range(TRIES - 1):
            try:
                return await self._connect_once()
            except (ConnectionAbortedError, ConnectionResetError, BrokenPipeError):
                # The other side may have too many guests, or be about to end.
                await asyncio.sleep(AGAIN_SECONDS)
        return await self._connect_once()

    async def _connect_once(self) -> socket.socket:
        try:
            return await self._connect()
        except ConnectionRefusedError:
            self._stop_listening()
            raise


def open_door(listening: socket.socket, store: tuple[str, int], secret: bytes) -> Relay:
    """A door for guests who prove the secret.

    Args:
        listening: A socket at the address at which the launchers meet.
        store: The address of the store to which the door leads.
    """
    unproven: dict[asyncio.Task[None], None] = {}
    """The tasks of guests without a proof, in the order in which they came."""

    async def admit(guest: socket.socket) -> None:
        task = asyncio.current_task()
        assert task
        if len(unproven) >= MOST_UNPROVEN:
            longest = next(iter(unproven))
            del unproven[longest]
            longest.cancel()
        unproven[task] = None
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                await prove_as_door(guest, secret)
        finally:
            unproven.pop(task, None)

    return Relay(listening, lambda: _connected_to(store), admit)


def open_tunnel(door: tuple[str, int], secret: bytes) -> Relay:
    """A tunnel from a free port of this machine to a door on another one, which was tried once.

    Raises:
        NoDoorError: Nobody asks for a proof at that address.
        AnotherSecretError: The door has another secret.
        OSError: It cannot be reached.
    """

    async def connect() -> socket.socket:
        far = await _connected_to(door)
        with ExitStack() as on_error:
            on_error.callback(far.close)
            await prove_as_guest(far, secret)
            on_error.pop_all()
        return far

    asyncio.run(connect()).close()
    return Relay(socket.create_server(("127.0.0.1", 0)), connect, _admit_all)


async def _admit_all(near: socket.socket) -> None:
    """Admit a process of this machine, which proves nothing."""


async def _connected_to(address: tuple[str, int]) -> socket.socket:
    far = socket.socket()
    far.setblocking(False)
    with ExitStack() as on_error:
        on_error.callback(far.close)
        async with asyncio.timeout(PROOF_SECONDS):
            await asyncio.get_running_loop().sock_connect(far, address)
        on_error.pop_all()
    return far


async def _pass_on(near: socket.socket, far: socket.socket) -> None:
    await _copy(near, far)
    _end(far)


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Pass on bytes until one of the two connections has ended."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while part := await loop.sock_recv(source, PART_BYTES):
            await loop.sock_sendall(sink, part)


def _end(sink: socket.socket) -> None:
    """Say that nothing more comes."""
    with suppress(OSError):  # It has ended by itself.
        sink.shutdown(socket.SHUT_WR)
