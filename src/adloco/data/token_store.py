"""A token store on disk that grows: chunks of rows are tokenised and appended. Each chunk is
committed as a whole, so that a process that continues after a kill ends with the same bytes.

A chunk is committed by replacing meta.json, after its tokens and its record in chunks.bin were
written. Bytes beyond the committed ones come from a chunk that was cut off, and are overwritten.
The text digest in the record of chunk i covers the texts of chunks 0 .. i: two stores with the same
digest hold the same text. Tokens that were changed from outside are found by their own digests.
"""

import hashlib
import json
import random
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, Literal

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import TypeAdapter

from adloco.data.encoding import Arrays, Chunk, encode_chunks
from adloco.data.rows import Split
from adloco.data.tokenizers import Tokenizer, load_tokenizer
from adloco.errors import require
from adloco.whole_file import checksum, checksums, write_text

CHUNKS, META = "chunks.bin", "meta.json"
DIGEST_BYTES = 16
RECORD = struct.Struct("<16sQ16sQ16s")
"""A chunk in chunks.bin: the digest of all texts up to its end; then for each split the number of
tokens up to its end, and the digest of its own tokens.
"""
SAMPLED_CHUNKS = 8
"""Chunks whose tokens are compared with their digests when a store is opened."""
SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT: Literal[5] = 5
"""Version of the files, in the folder's name, so that none replaces the stores of another."""
WAIT_SECONDS = 1.0
"""Wait of a process for the lock before it looks at what another one has appended."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Contents of a store, and the place where its source continues."""

    format: Literal[5] = FORMAT
    source: str
    dtype: Literal["uint16", "uint32"]
    train: int = 0
    """Tokens to train on."""
    validation: int = 0
    """Tokens to validate on."""
    validation_bytes: int = 0
    """UTF-8 bytes of the texts to validate on."""
    validation_documents: int = 0
    rows: int = 0
    """Rows read of all stages, including those that were left out."""
    chunks: int = 0
    digest: str = "0" * 2 * DIGEST_BYTES
    """Digest of the texts of all chunks."""
    stage: int = 0
    row: int = 0
    """Rows read of this stage."""
    files: int = 0
    """Files of this stage that were read to their end."""
    rows_of_files: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    tokenizer: dict[str, str] = field(default_factory=dict)
    """Checksums of the tokenizer's files."""

    @property
    def documents(self) -> int:
        """Rows whose text was taken."""
        return self.rows - sum(self.skipped.values())

    @property
    def corpus(self) -> str:
        """Equal for equal text, whatever the tokenizer."""
        return f"{self.chunks}:{self.digest}"


Feed = Callable[[State], Iterator[Chunk]]
"""From a state to the chunks that follow it; the last one sets `complete` in its `after`."""


class TokenStore:
    """A folder of tokens that grows. Several processes may share it: one at a time appends, under a
    lock, and the others see what it has appended.
    """

    def __init__(
        self, folder: Path, feed: Feed, source: str, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        """Open the folder. If it is new or incomplete, begin it with this tokenizer.

        Raises:
            ValueError: A file of the tokenizer, or a chunk of `sample_chunks`, was changed.
        """
        self.folder = folder
        self._feed = feed
        self._unread: Iterator[Chunk] | None = None
        self._pending: Iterator[tuple[Chunk, Arrays]] = iter(())
        self._pending_after: State | None = None
        self._lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        self._threads = RLock()
        if not intact(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                if not intact(folder):
                    _begin(folder, source, tokenizer())
        self.state = _read(folder)
        for name, expected in self.state.tokenizer.items():
            require(
                (folder / name).is_file() and checksum(folder / name) == expected,
                _changed(folder, name),
            )
        for _ in self.verify(sample_chunks(self.state.chunks)):
            pass
        self.tokenizer = load_tokenizer(folder)

    def grow(
        self, enough: Callable[[State], bool], pool: Executor | None = None, ahead: int = 1
    ) -> Iterator[State]:
        """Append chunks until there is enough or the source has ended.

        Args:
            enough: True for a state that needs no further chunk.
            pool, ahead: As in `encode_chunks`.

        Yields:
            The state after each chunk, or after each second of waiting for another process.
        """
        with self._threads:
            while not (self.state.complete or enough(self.state)):
                try:
                    with self._lock.acquire(timeout=WAIT_SECONDS):
                        self._advance(pool, ahead)
                except Timeout:
                    self.state = _read(self.folder)
                yield self.state

    def tokens(self, split: Split) -> NDArray[Any]:
        """The tokens of a split so far; the end-of-text id follows each document."""
        count = self.state.train if split == "train" else self.state.validation
        dtype = self.state.dtype
        if not count:  # No file of 0 bytes can be mapped.
            return np.zeros(0, dtype)
        return np.memmap(self.folder / f"{split}.bin", dtype=dtype, mode="r", shape=(count,))

    def digest(self, chunks: int) -> str:
        """Digest of the texts of the first `chunks` chunks."""
        with (self.folder / CHUNKS).open("rb") as file:
            file.seek((chunks - 1) * RECORD.size)
            return file.read(DIGEST_BYTES).hex()

    def verify(self, chosen: Sequence[int] | None = None) -> Iterator[int]:
        """Compare tokens with their digests: those of the chunks of these numbers; None: all.

        Yields:
            The number of tokens of each chunk, after it was compared.

        Raises:
            ValueError: A chunk was changed.
        """
        tokens = [self.tokens(split) for split in SPLITS]
        records = (self.folder / CHUNKS).read_bytes()
        for chunk in range(self.state.chunks) if chosen is None else chosen:
            # No chunk comes before the first: its tokens begin at 0.
            before = RECORD.unpack_from(records, (chunk - 1) * RECORD.size) if chunk else (0,) * 5
            record = RECORD.unpack_from(records, chunk * RECORD.size)
            compared = 0
            for split, own, at in zip(SPLITS, tokens, (1, 3), strict=True):
                start, end, expected = before[at], record[at], record[at + 1]
                known = _digest(own[start:end]) == expected
                require(known, _changed(self.folder, f"{split}.bin"))
                compared += end - start
            yield compared

    def _advance(self, pool: Executor | None, ahead: int) -> None:
        state = _read(self.folder)
        if state.chunks > self.state.chunks:
            # Another process has appended; perhaps that is enough.
            self.state = state
            return
        # Nothing is pending until the chunk is committed: after an error, another thread would find
        # the end of an iterator that has failed, or the chunk after one that was not written.
        before, self._pending_after = self._pending_after, None
        if before is None or not self._continues(before, state):
            chunks = self._feed(state)
            self._unread = None if pool else chunks  # A pool reads some ahead.
            self._pending = encode_chunks(
                chunks, self.folder, self.tokenizer, state.dtype, pool, ahead
            )
        chunk, arrays = next(self._pending)
        try:
            self.state = self._append(state, chunk, arrays)
        except OSError as error:  # That of a full disk names no file.
            raise ValueError(
                f"the token cache {self.folder} cannot be written ({error.strerror}); make room, "
                "or set data.cache to another folder"
            ) from error
        self._pending_after = self.state

    def _continues(self, before: State, state: State) -> bool:
        """True if the next pending chunk is the one after this state.

        Chunks that other processes have appended are read and left out, where that takes no more
        rows than to read the data file again from its beginning, of the hub with a download: ranks
        of a run append in turn.
        """
        behind, here = state.chunks - before.chunks, state.row - state.rows_of_files
        if behind < 1 or self._unread is None or state.rows - before.rows > here:
            return behind == 0
        deque(islice(self._unread, behind), maxlen=0)
        return True

    def _append(self, state: State, chunk: Chunk, arrays: Arrays) -> State:
        each = np.dtype(state.dtype).itemsize
        for split in SPLITS:
            start = getattr(state, split) * each
            _write_at(self.folder / f"{split}.bin", start, arrays[split].tobytes())
        digest, num_bytes = hashlib.sha256(bytes.fromhex(state.digest)), 0
        for split in SPLITS:
            for text in chunk.texts[split]:
                # With the lengths, no two different lists of documents give the same bytes.
                content = text.encode("utf-8")
                digest.update(split.encode() + len(content).to_bytes(8, "little") + content)
                num_bytes += len(content) if split == "validation" else 0
        name = digest.digest()[:DIGEST_BYTES]
        train, validation = (getattr(state, split) + len(arrays[split]) for split in SPLITS)
        sums = [_digest(arrays[split]) for split in SPLITS]
        record = RECORD.pack(name, train, sums[0], validation, sums[1])
        _write_at(self.folder / CHUNKS, state.chunks * RECORD.size, record)
        after = replace(
            state,
            train=train,
            validation=validation,
            validation_bytes=state.validation_bytes + num_bytes,
            validation_documents=state.validation_documents + len(chunk.texts["validation"]),
            chunks=state.chunks + 1,
            digest=name.hex(),
            **chunk.after,
        )
        _commit(self.folder, after)
        return after


def _begin(folder: Path, source: str, tokenizer: Tokenizer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer.save(folder)
    state = State(
        source=source,
        dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        tokenizer=checksums(folder),
    )
    for name in (*(f"{split}.bin" for split in SPLITS), CHUNKS):
        (folder / name).touch()
    _commit(folder, state)


def _commit(folder: Path, state: State) -> None:
    write_text(folder / META, json.dumps(asdict(state)))


def _read(folder: Path) -> State:
    """The state of a store; ValueError if its file is damaged."""
    content = (folder / META).read_bytes()
    try:
        state = TypeAdapter(State).validate_json(content)
        # Defaults and conversions would hide what is missing.
        require(asdict(state) == json.loads(content), "its values are not those of a state")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder / META} is damaged; remove {folder}, and it is made again"
        ) from error
    return state


def intact(folder: Path) -> bool:
    """True if the folder is a store of this format that has all committed bytes."""
    try:
        state = _read(folder)
    except (OSError, ValueError):  # None is there, or of another format.
        return False
    each = np.dtype(state.dtype).itemsize
    sizes = {folder / f"{split}.bin": getattr(state, split) * each for split in SPLITS}
    sizes[folder / CHUNKS] = state.chunks * RECORD.size
    return all(file.exists() and file.stat().st_size >= size for file, size in sizes.items())


def sample_chunks(count: int) -> list[int]:
    """Some of this many chunks: always the same, the first and the last among them."""
    inner = range(1, count - 1)
    chosen = random.Random(0).sample(inner, min(len(inner), SAMPLED_CHUNKS - 2))
    return sorted({*chosen, *range(count)[:1], *range(count)[-1:]})


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(tokens).data).digest()[:DIGEST_BYTES]


def _changed(folder: Path, name: str) -> str:
    """A sentence that says that a file of a token store was changed."""
    return (
        f"{folder / name} in the token cache is not what was written there; remove {folder}, and "
        "it is made again from the text"
    )


def _write_at(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as out:
        out.truncate(offset)
        out.seek(offset)
        out.write(content)
