"""The secret of a run (run.secret_file), and the proof that both ends of a connection know it.

Each end sends fresh random bytes. Then the guest, who has connected, sends an HMAC-SHA256 of both
sides' bytes under the secret, and the door answers with another one: mutual authentication in three
passes, as in ISO/IEC 9798-4. The words GUEST and DOOR keep an end from sending back what it was
sent, and the fresh bytes keep a stranger from using again what he has heard. The door shows no
proof to a guest who has not proved the secret, so a stranger who only connects learns nothing of
it. A machine in the middle can pass on both proofs, and then read and change what follows.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import stat
from pathlib import Path

from adloco.errors import require

GREETING = b"adloco door 1\n"
"""The first bytes of both ends. A store of torch is silent until it is spoken to."""
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
GUEST, DOOR = b"adloco guest", b"adloco door"
REFUSED = bytes(PROOF_BYTES)
"""The door's answer to a guest with another secret."""
PROOF_SECONDS = 5.0
"""Longest wait for a part of the proof."""
LEAST_BYTES, MOST_BYTES = 16, 4096


class AnotherSecretError(ConnectionError):
    """The other end of a connection knows another secret, or none."""


class NoDoorError(ConnectionError):
    """The other end of a connection does not greet, so it asks for no proof."""


def read_secret(file: str) -> bytes:
    """The secret in a file, without the white space around it.

    Raises:
        ValueError: It cannot be read, others than its owner can read it, or it is too short.
    """
    path, name = Path(file), f"run.secret_file {file!r}"
    try:
        mode = path.stat().st_mode
        # Nothing is read of a pipe or a device, which may have no end.
        secret = _beginning(path).strip() if stat.S_ISREG(mode) else b""
    except (OSError, ValueError) as error:  # ValueError: no file can have that name.
        raise ValueError(
            f"{name} cannot be read ({error}); name a file with the secret that all machines of "
            "the run share"
        ) from error
    require(stat.S_ISREG(mode), f"{name} is no file; name a file with a secret")
    require(
        not mode & (stat.S_IRWXG | stat.S_IRWXO),
        f"{name} may be read or changed by others than its owner (its mode is "
        f"{stat.S_IMODE(mode):o}); use chmod 600 {file}",
    )
    require(
        LEAST_BYTES <= len(secret) <= MOST_BYTES,
        f"{name} has a secret of {len(secret)} bytes, and needs {LEAST_BYTES} to {MOST_BYTES}; "
        f"make one with: openssl rand -hex 32 > {file}",
    )
    return secret


def proof(secret: bytes, speaker: bytes, of_guest: bytes, of_door: bytes) -> bytes:
    """The bytes by which one end shows that it knows the secret.

    Args:
        speaker: GUEST or DOOR.
        of_guest: The random bytes that the guest has sent on this connection.
        of_door: Those of the door.
    """
    return hmac.digest(secret, speaker + of_guest + of_door, hashlib.sha256)


async def prove_as_guest(connection: socket.socket, secret: bytes) -> None:
    """Prove the secret to the door at the other end, and see that it knows the secret too.

    Raises:
        NoDoorError: Nobody asks for a proof there.
        AnotherSecretError: The other end knows another secret.
        OSError: The connection has ended.
    """
    loop, of_guest = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(connection, GREETING + of_guest)
    of_door = await _greeted(connection)
    await loop.sock_sendall(connection, proof(secret, GUEST, of_guest, of_door))
    answer = await _read(connection, PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(secret, DOOR, of_guest, of_door)):
        raise AnotherSecretError


async def prove_as_door(connection: socket.socket, secret: bytes) -> None:
    """Let the guest at the other end prove the secret, and then prove it to him.

    Raises: As `prove_as_guest`.
    """
    loop, of_door = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(connection, GREETING + of_door)
    of_guest = await _greeted(connection)
    answer = await _read(connection, PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(secret, GUEST, of_guest, of_door)):
        await loop.sock_sendall(connection, REFUSED)
        raise AnotherSecretError
    await loop.sock_sendall(connection, proof(secret, DOOR, of_guest, of_door))


def asks_for_proof(connection: socket.socket, seconds: float) -> bool:
    """True if the other end of a new connection greets as a door does, within some seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
    except OSError:
        return False


def _beginning(path: Path) -> bytes:
    with path.open("rb") as content:
        return content.read(MOST_BYTES + 1)


async def _greeted(connection: socket.socket) -> bytes:
    """The other end's random bytes, after its greeting."""
    try:
        greeting = await _read(connection, len(GREETING))
    except TimeoutError:
        raise NoDoorError from None
    if greeting != GREETING:
        raise NoDoorError
    return await _read(connection, NONCE_BYTES)


async def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes of the other end; no byte after them is read."""
    loop, found = asyncio.get_running_loop(), b""
    async with asyncio.timeout(PROOF_SECONDS):
        while len(found) < size:
            part = await loop.sock_recv(connection, size - len(found))
            if not part:
                raise ConnectionAbortedError
            found += part
    return found
