"""A token cache that grows: chunks of rows are tokenised and appended, each committed as a whole,
so that whoever goes on ends with the same bytes.

A chunk is committed by replacing meta.json, after its tokens and its digest stand in the files;
what stands there beyond is from a chunk that was cut off, and is overwritten. The digest of chunk i
covers the texts of chunks 0 .. i: two caches with the same one hold the same text.
"""

import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from adloco.data.corpus import Corpus
from adloco.data.data_settings import DataSettings
from adloco.data.rows import Position, Split, open_rows, stages
from adloco.data.tokenizers import Tokenizer, load_tokenizer

ROWS_AT_ONCE = 256
DIGESTS, META = "digests.bin", "meta.json"
DIGEST_BYTES = 16
SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT = 2
WAIT_SECONDS = 1.0
"""For whoever appends, before looking at what it has appended."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a cache holds, and where its source goes on."""

    format: int = FORMAT
    source: str
    dtype: str
    train: int = 0
    """Tokens."""
    validation: int = 0
    documents: int = 0
    rows: int = 0
    """Rows read of all stages, those left out included."""
    chunks: int = 0
    digest: str = "0" * 2 * DIGEST_BYTES
    """Digest of the texts of all chunks."""
    stage: int = 0
    row: int = 0
    """Rows read of this stage."""
    file_rows: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    @property
    def corpus(self) -> str:
        """Equal for equal text, whatever the tokenizer."""
        return f"{self.chunks}:{self.digest}"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Texts to append, and where the source goes on after them."""

    texts: dict[Split, list[str]]
    after: dict[str, Any]
    """Fields of `State`."""


Feed = Callable[[State], Iterator[Chunk]]
"""The chunks that follow on a state; the last one has `complete` in its `after`."""


def corpus_feed(corpus: Corpus) -> Feed:
    """Chunks of a corpus in memory: the train documents, then those to validate on."""

    def feed(state: State) -> Iterator[Chunk]:
        documents: list[tuple[Split, str]] = [("train", text) for text in corpus.train] + [
            ("validation", text) for text in corpus.validation
        ]
        for start in range(state.row, len(documents), ROWS_AT_ONCE):
            part = documents[start : start + ROWS_AT_ONCE]
            end = start + len(part)
            texts: dict[Split, list[str]] = {
                split: [text for to, text in part if to == split] for split in SPLITS
            }
            yield Chunk(
                texts=texts,
                after={
                    "row": end,
                    "rows": end,
                    "skipped": dict(corpus.skipped),
                    "complete": end == len(documents),
                },
            )

    return feed


def dataset_feed(data: DataSettings) -> Feed:
    """Chunks of a dataset's rows, read as they are asked for."""

    def feed(state: State) -> Iterator[Chunk]:
        passes = stages(data)
        position = Position(
            row=state.row, file_rows=list(state.file_rows), skipped=Counter(state.skipped)
        )
        before = state.rows - state.row
        for index in range(state.stage, len(passes)):
            texts: dict[Split, list[str]] = {split: [] for split in SPLITS}
            for number, row in open_rows(data, passes[index], {data.text_column: str}, position):
                if row is not None:
                    texts[passes[index].split_of(number)].append(row[data.text_column])
                if (number + 1) % ROWS_AT_ONCE == 0:
                    yield Chunk(
                        texts=texts,
                        after={
                            "stage": index,
                            "rows": before + position.row,
                            **_position_fields(position),
                        },
                    )
                    texts = {split: [] for split in SPLITS}
            before += position.row
            position = Position(skipped=position.skipped)
            last = index + 1 == len(passes)
            yield Chunk(
                texts=texts,
                after={
                    "stage": index + 1,
                    "rows": before,
                    "complete": last,
                    **_position_fields(position),
                },
            )

    return feed


def _position_fields(position: Position) -> dict[str, Any]:
    return {
        "row": position.row,
        "file_rows": list(position.file_rows),
        "skipped": dict(position.skipped),
    }


class TokenStore:
    """A cache folder that grows. Several processes may share it: one appends at a time, under a
    lock, and the others see what it has appended.
    """

    def __init__(
        self, folder: Path, feed: Feed, source: str, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        """Opens the folder, or begins it with this tokenizer; what is damaged is begun again."""
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
        self.tokenizer = load_tokenizer(folder)
        self.state = _read(folder)

    def grow(
        self, enough: Callable[[State], bool], pool: Executor | None = None, ahead: int = 1
    ) -> Iterator[State]:
        """Appends until there is enough or the source has ended; yields each new state. pool:
        processes that tokenise `ahead` chunks at a time.
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
                # Lets go of a text in memory.
                self._pending, self._feed = iter(()), lambda state: iter(())

    def tokens(self, split: Split) -> NDArray[Any]:
        """The tokens of a split so far, each document followed by the end-of-text id."""
        count = self.state.train if split == "train" else self.state.validation
        return (
            np.memmap(
                self.folder / f"{split}.bin", dtype=self.state.dtype, mode="r", shape=(count,)
            )
            if count
            else np.zeros(0, self.state.dtype)
        )

    def digest(self, chunks: int) -> str:
        """Digest of the texts of the first so many chunks."""
        with (self.folder / DIGESTS).open("rb") as file:
            file.seek((chunks - 1) * DIGEST_BYTES)
            return file.read(DIGEST_BYTES).hex()

    def _advance(self, pool: Executor | None, ahead: int) -> None:
        state = _read(self.folder)
        if state.chunks > self.state.chunks:
            # Somebody else has been here; perhaps that is enough.
            self.state = state
            return
        if self._pending_from != state.chunks:
            self._pending = _encoded(
                self._feed(state), self.folder, self.tokenizer, state.dtype, pool, ahead
            )
        chunk, arrays = next(self._pending)
        self.state = self._append(state, chunk, arrays)
        self._pending_from = self.state.chunks

    def _append(self, state: State, chunk: Chunk, arrays: "Arrays") -> State:
        for split in SPLITS:
            _write_at(
                self.folder / f"{split}.bin",
                getattr(state, split) * np.dtype(state.dtype).itemsize,
                arrays[split].tobytes(),
            )
        digest = hashlib.sha256(bytes.fromhex(state.digest))
        for split in SPLITS:
            for text in chunk.texts[split]:
                # Lengths first, so that no two lists of documents give the same bytes.
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
            **chunk.after,
        )
        _commit(self.folder, after)
        return after


Arrays = dict[Split, NDArray[Any]]


def _encoded(
    chunks: Iterator[Chunk],
    folder: Path,
    tokenizer: Tokenizer,
    dtype: str,
    pool: Executor | None,
    ahead: int,
) -> Iterator[tuple[Chunk, Arrays]]:
    """The chunks in their order, with their tokens."""
    if pool is None:
        for chunk in chunks:
            yield chunk, encode(tokenizer, chunk.texts, dtype)
        return
    in_flight: deque[tuple[Chunk, Future[Arrays]]] = deque()
    failure: ValueError | None = None
    while True:
        try:
            while len(in_flight) < ahead and failure is None and (following := next(chunks, None)):
                in_flight.append(
                    (following, pool.submit(_encode_in, str(folder), following.texts, dtype))
                )
        except ValueError as error:
            # What came before the bad row is committed first.
            failure = error
        if not in_flight:
            break
        chunk, arrays = in_flight.popleft()
        yield chunk, arrays.result()
    if failure:
        raise failure


def encode(tokenizer: Tokenizer, texts: dict[Split, list[str]], dtype: str) -> Arrays:
    """Tokens of texts, each ended by the end-of-text id, in one array per split."""

    def packed(part: list[str]) -> NDArray[Any]:
        encoded = tokenizer.encode(part) if part else []
        return np.array(
            [token for ids in encoded for token in (*ids, tokenizer.end_of_text)], dtype=dtype
        )

    return {split: packed(part) for split, part in texts.items()}


def _encode_in(folder: str, texts: dict[Split, list[str]], dtype: str) -> Arrays:
    return encode(_tokenizer_of(folder), texts, dtype)


@lru_cache(maxsize=1)
def _tokenizer_of(folder: str) -> Tokenizer:
    return load_tokenizer(Path(folder))


def _begin(folder: Path, source: str, tokenizer: Tokenizer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer.save(folder)
    for name in (*(f"{split}.bin" for split in SPLITS), DIGESTS):
        (folder / name).touch()
    _commit(
        folder, State(source=source, dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    )


def _commit(folder: Path, state: State) -> None:
    temporary = folder / f".{META}"
    temporary.write_text(json.dumps(asdict(state)))
    temporary.replace(folder / META)


def _read(folder: Path) -> State:
    content = json.loads((folder / META).read_text())
    if "shard_rows" in content:  # What earlier versions called it.
        content["file_rows"] = content.pop("shard_rows")
    return State(**content)


def _intact(folder: Path) -> bool:
    """True if there is a cache of this format with all that was committed."""
    if (
        not (folder / META).exists()
        or json.loads((folder / META).read_text()).get("format") != FORMAT
    ):
        return False
    state = _read(folder)
    sizes = {
        f"{split}.bin": getattr(state, split) * np.dtype(state.dtype).itemsize for split in SPLITS
    } | {DIGESTS: state.chunks * DIGEST_BYTES}
    return all(
        (folder / name).exists() and (folder / name).stat().st_size >= size
        for name, size in sizes.items()
    )


def _write_at(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as out:
        out.truncate(offset)
        out.seek(offset)
        out.write(content)
