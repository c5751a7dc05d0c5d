"""A token store on disk that grows: chunks of rows are tokenised and appended. Each chunk is
committed as a whole, so that a process that continues after a kill ends with the same bytes.

A chunk is committed by replacing meta.json, after its tokens and its digest were written. Bytes
beyond the committed ones come from a chunk that was cut off, and are overwritten. The digest of
chunk i covers the texts of chunks 0 .. i: two stores with the same digest hold the same text.
What was changed from outside is found by checksums of blocks of tokens, see token_checksums.py.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import TypeAdapter

from adloco.data.encoding import Arrays, Chunk, encode_chunks
from adloco.data.rows import Split
from adloco.data.token_checksums import (
    RECORD,
    block_records,
    changed,
    check_blocks,
    sample_blocks,
    sums_file,
)
from adloco.data.tokenizers import Tokenizer, load_tokenizer
from adloco.errors import require
from adloco.whole_file import checksum, checksums, write_text

DIGESTS, META = "digests.bin", "meta.json"
DIGEST_BYTES = 16
SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT = 2
WAIT_SECONDS = 1.0
"""Wait of a process for the lock before it looks at what another one has appended."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Contents of a store, and the place where its source continues."""

    format: int = FORMAT
    source: str
    dtype: str
    train: int = 0
    """Tokens to train on."""
    validation: int = 0
    """Tokens to validate on."""
    documents: int = 0
    rows: int = 0
    """Rows read of all stages, including those that were left out."""
    chunks: int = 0
    digest: str = "0" * 2 * DIGEST_BYTES
    """Digest of the texts of all chunks."""
    stage: int = 0
    row: int = 0
    """Rows read of this stage."""
    file_rows: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    blocks: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Blocks of each split that have checksums."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """Checksums of the tokenizer's files."""

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
            ValueError: A file of the tokenizer, or one of the blocks of tokens that are read to
                find out, was changed.
        """
        self.folder = folder
        self._feed = feed
        self._pending: Iterator[tuple[Chunk, Arrays]] = iter(())
        self._pending_from = -1
        self._lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        self._threads = RLock()
        if not _intact(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                if not _intact(folder):
                    _begin(folder, source, tokenizer())
        self.state = _read(folder)
        for name, expected in self.state.tokenizer.items():
            require(
                (folder / name).is_file() and checksum(folder / name) == expected,
                changed(folder, name),
            )
        for _ in self._check(sample_blocks):
            pass
        self.tokenizer = load_tokenizer(folder)

    def grow(
        self, enough: Callable[[State], bool], pool: Executor | None = None, ahead: int = 1
    ) -> Iterator[State]:
        """Append chunks until there is enough or the source has ended.

        Args:
            enough: True for a state that needs no further chunk.
            pool: Processes that tokenise; None: this process does.
            ahead: Number of chunks that the pool tokenises at a time.

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
            if self.state.complete:
                # Frees a corpus in memory.
                self._pending, self._feed = iter(()), lambda state: iter(())

    def tokens(self, split: Split) -> NDArray[Any]:
        """The tokens of a split so far; the end-of-text id follows each document."""
        count = self.state.train if split == "train" else self.state.validation
        return (
            np.memmap(
                self.folder / f"{split}.bin", dtype=self.state.dtype, mode="r", shape=(count,)
            )
            if count
            else np.zeros(0, self.state.dtype)
        )

    def digest(self, chunks: int) -> str:
        """Digest of the texts of the first `chunks` chunks."""
        with (self.folder / DIGESTS).open("rb") as file:
            file.seek((chunks - 1) * DIGEST_BYTES)
            return file.read(DIGEST_BYTES).hex()

    def verify(self) -> Iterator[int]:
        """Compare all tokens with their checksums.

        Yields:
            The number of tokens of each block, after it was compared.

        Raises:
            ValueError: A block was changed.
        """
        return self._check(range)

    def _check(self, choose: Callable[[int], Sequence[int]]) -> Iterator[int]:
        """Compare the blocks that are chosen out of so many."""
        for split, count in self.state.blocks.items():
            yield from check_blocks(self.folder, split, self.tokens(split), choose(count))

    def _advance(self, pool: Executor | None, ahead: int) -> None:
        state = _read(self.folder)
        if state.chunks > self.state.chunks:
            # Another process has appended; perhaps that is enough.
            self.state = state
            return
        if self._pending_from != state.chunks:
            self._pending = encode_chunks(
                self._feed(state), self.folder, self.tokenizer, state.dtype, pool, ahead
            )
        chunk, arrays = next(self._pending)
        self.state = self._append(state, chunk, arrays)
        self._pending_from = self.state.chunks

    def _append(self, state: State, chunk: Chunk, arrays: Arrays) -> State:
        for split in SPLITS:
            _write_at(
                self.folder / f"{split}.bin",
                getattr(state, split) * np.dtype(state.dtype).itemsize,
                arrays[split].tobytes(),
            )
        blocks = self._append_sums(state, arrays)
        digest = hashlib.sha256(bytes.fromhex(state.digest))
        for split in SPLITS:
            for text in chunk.texts[split]:
                # With the lengths, no two different lists of documents give the same bytes.
                content = text.encode("utf-8")
                digest.update(split.encode() + len(content).to_bytes(8, "little") + content)
        name = digest.digest()[:DIGEST_BYTES]
        _write_at(self.folder / DIGESTS, state.chunks * DIGEST_BYTES, name)
        after = replace(
            state,
            train=state.train + len(arrays["train"]),
            validation=state.validation + len(arrays["validation"]),
            documents=state.documents + sum(len(texts) for texts in chunk.texts.values()),
            chunks=state.chunks + 1,
            digest=name.hex(),
            blocks=blocks,
            **chunk.after,
        )
        _commit(self.folder, after)
        return after

    def _append_sums(self, state: State, arrays: Arrays) -> dict[Split, int]:
        """Append the checksums of a chunk; returns the blocks of each split after it."""
        records = {split: block_records(arrays[split], getattr(state, split)) for split in SPLITS}
        for split in SPLITS:
            file, offset = sums_file(self.folder, split), state.blocks[split] * RECORD.size
            _write_at(file, offset, b"".join(records[split]))
        return {split: state.blocks[split] + len(records[split]) for split in SPLITS}


def _begin(folder: Path, source: str, tokenizer: Tokenizer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer.save(folder)
    state = State(
        source=source,
        dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        tokenizer=checksums(folder),
    )
    for name in (*(f"{split}.bin" for split in SPLITS), DIGESTS):
        (folder / name).touch()
    for split in SPLITS:
        sums_file(folder, split).touch()
    _commit(folder, state)


def _commit(folder: Path, state: State) -> None:
    write_text(folder / META, json.dumps(asdict(state)))


def _read(folder: Path) -> State:
    """The state of a store.

    Raises:
        ValueError: Its file is damaged.
    """
    content = json.loads((folder / META).read_text(encoding="utf-8"))
    known = {each.name for each in fields(State)}
    require(
        content.keys() == known and content["dtype"] in ("uint16", "uint32"),
        f"{folder / META} is damaged; remove {folder}, and it is made again",
    )
    return TypeAdapter(State).validate_python(content)


def _intact(folder: Path) -> bool:
    """True if the folder is a store of this format that has all committed bytes."""
    try:
        state = _read(folder)
    except (OSError, ValueError, TypeError, RecursionError):  # None is there, or no JSON object.
        return False
    if state.format != FORMAT:
        return False
    sizes = {
        f"{split}.bin": getattr(state, split) * np.dtype(state.dtype).itemsize for split in SPLITS
    } | {DIGESTS: state.chunks * DIGEST_BYTES}
    for split, blocks in state.blocks.items():
        sizes[sums_file(folder, split).name] = blocks * RECORD.size
    return all(
        (folder / name).exists() and (folder / name).stat().st_size >= size
        for name, size in sizes.items()
    )


def _write_at(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as out:
        out.truncate(offset)
        out.seek(offset)
        out.write(content)
