"""The proof that both ends of a connection know the secret of a run, computed here by hand."""

import asyncio
import hashlib
import hmac
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from adloco.elastic import secret as proofs
from adloco.elastic.secret import (
    AnotherSecretError,
    NoDoorError,
    asks_for_proof,
    prove_as_door,
    prove_as_guest,
    read_secret,
)

SECRET, GREETING = b"sixteen bytes ok", b"adloco door 1\n"


def hand_made(speaker: bytes, of_guest: bytes, of_door: bytes, secret: bytes = SECRET) -> bytes:
    """HMAC(K, m) = H((K ^ opad) | H((K ^ ipad) | m)) of RFC 2104, with blocks of 64 bytes."""
    key = secret.ljust(64, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in key) for pad in (0x36, 0x5C))
    message = speaker + of_guest + of_door
    return hashlib.sha256(outer + hashlib.sha256(inner + message).digest()).digest()


def talk(end: Coroutine[Any, Any, None], *, other: Any) -> tuple[Exception | None, Any]:
    """The error of one end of a proof, and what a function that speaks at the other end returns."""

    async def both() -> tuple[Exception | None, Any]:
        told, spoken = await asyncio.gather(end, asyncio.to_thread(other), return_exceptions=True)
        return told, spoken

    return asyncio.run(both())


@pytest.fixture
def ends() -> Any:
    """Two ends of a connection: one for a loop, and one for a test that speaks by hand."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(20)
    mine.setblocking(False)
    with mine, theirs:
        yield mine, theirs


def exactly(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


def test_a_door_admits_who_proves_the_secret_and_proves_it_too(ends: Any) -> None:
    mine, theirs = ends

    def guest() -> bool:
        theirs.sendall(GREETING + b"g" * 32)
        greeting, of_door = exactly(theirs, len(GREETING)), exactly(theirs, 32)
        assert greeting == GREETING
        theirs.sendall(hand_made(b"adloco guest", b"g" * 32, of_door) + b"first bytes")
        return exactly(theirs, 32) == hand_made(b"adloco door", b"g" * 32, of_door)

    assert talk(prove_as_door(mine, SECRET), other=guest) == (None, True)
    assert mine.recv(100) == b"first bytes", "what follows the proof is not read"


def test_a_guest_proves_the_secret_to_a_door_that_proves_it_too(ends: Any) -> None:
    mine, theirs = ends

    def door() -> bool:
        theirs.sendall(GREETING + b"d" * 32)
        assert exactly(theirs, len(GREETING)) == GREETING
        of_guest = exactly(theirs, 32)
        proof = exactly(theirs, 32)
        theirs.sendall(hand_made(b"adloco door", of_guest, b"d" * 32))
        return proof == hand_made(b"adloco guest", of_guest, b"d" * 32)

    assert talk(prove_as_guest(mine, SECRET), other=door) == (None, True)


def test_a_door_with_another_secret(ends: Any) -> None:
    """It says so, and shows no proof of its own."""
    mine, theirs = ends

    def guest() -> bytes:
        theirs.sendall(GREETING + b"g" * 32)
        exactly(theirs, len(GREETING) + 32)
        theirs.sendall(b"x" * 32)
        return exactly(theirs, 32)

    error, answer = talk(prove_as_door(mine, SECRET), other=guest)
    assert isinstance(error, AnotherSecretError) and answer == bytes(32)


@pytest.mark.parametrize("sent_back", [True, False])
def test_a_guest_at_a_door_without_the_secret(sent_back: bool, ends: Any) -> None:
    """The guest's own proof, sent back, is none of the door."""
    mine, theirs = ends

    def door() -> None:
        theirs.sendall(GREETING + b"d" * 32)
        exactly(theirs, len(GREETING) + 32)
        proof = exactly(theirs, 32)
        theirs.sendall(proof if sent_back else bytes(32))

    assert isinstance(talk(prove_as_guest(mine, SECRET), other=door)[0], AnotherSecretError)


def test_a_transcript_that_is_played_again_is_refused(ends: Any) -> None:
    """A stranger has heard all that a guest has said to this door."""
    heard = GREETING + b"g" * 32 + hand_made(b"adloco guest", b"g" * 32, b"d" * 32)
    mine, theirs = ends
    error, _ = talk(prove_as_door(mine, SECRET), other=lambda: theirs.sendall(heard))
    assert isinstance(error, AnotherSecretError)


def test_who_does_not_greet_is_no_door(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = ends
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert isinstance(talk(prove_as_guest(mine, SECRET), other=bool)[0], NoDoorError)
    monkeypatch.setattr(proofs, "PROOF_SECONDS", 0.05)
    silent, _other = socket.socketpair()
    silent.setblocking(False)
    with silent, _other:
        assert isinstance(talk(prove_as_guest(silent, SECRET), other=bool)[0], NoDoorError)


def test_a_door_is_known_by_its_greeting(ends: Any) -> None:
    mine, theirs = ends
    assert not asks_for_proof(theirs, 0.05)
    mine.send(GREETING + b"d" * 32)
    assert asks_for_proof(theirs, 20)
    mine.send(b"something else, which is longer")
    assert not asks_for_proof(theirs, 20)


def test_a_secret_is_what_its_owner_alone_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"\n  0123456789abcdef\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == b"0123456789abcdef"
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"its mode is {mode:o}.*; use chmod 600"):
            read_secret(str(file))
    file.chmod(0o600)
    file.write_bytes(b" 0123456789abcde\n")
    with pytest.raises(ValueError, match="secret of 15 bytes, and needs 16 to 4096; make one"):
        read_secret(str(file))
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="and needs 16 to 4096"):
        read_secret(str(file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "No such file or directory"),
        (".", "is no file; name a file with a secret"),
        ("nul\0", "cannot be read (embedded null byte)"),
    ],
)
def test_a_secret_that_is_no_file(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        read_secret(f"{tmp_path}/{name}")
    assert message in str(error.value) and "run.secret_file" in str(error.value)


def test_the_hand_made_proof_is_that_of_the_standard_library() -> None:
    own = hand_made(b"adloco guest", b"g" * 32, b"d" * 32)
    assert own == hmac.digest(SECRET, b"adloco guest" + b"g" * 32 + b"d" * 32, "sha256")
