"""Tokens of texts, made in this process or, several chunks at a time, in a pool of processes."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adloco.data.rows import Split
from adloco.data.text_pieces import PIECE
from adloco.data.tokenizers import Tokenizer, load_tokenizer

Texts = dict[Split, list[str]]
Arrays = dict[Split, NDArray[Any]]
"""Tokens of a chunk, one-dimensional, by split."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Texts to append to a token store, and where its source continues after them."""

    texts: Texts
    after: dict[str, Any]
    """Fields of the store's `State` once the texts are appended."""


def encode_chunks(
    chunks: Iterator[Chunk],
    folder: Path,
    tokenizer: Tokenizer,
    dtype: str,
    pool: Executor | None,
    ahead: int,
) -> Iterator[tuple[Chunk, Arrays]]:
    """The chunks in their order, with their tokens.

    Args:
        chunks: What to encode. A ValueError from it is raised after the chunks before it.
        folder: Folder from which the processes of the pool load the tokenizer.
        tokenizer: The same tokenizer, for this process.
        pool: Processes that encode; None: this process does.
        ahead: Number of chunks that the pool encodes at a time.
    """
    if pool is None:
        for chunk in chunks:
            yield chunk, encode(tokenizer, chunk.texts, dtype)
        return
    in_flight: deque[tuple[Chunk, Future[Arrays]]] = deque()
    failure: ValueError | None = None
    while True:
        try:
            while len(in_flight) < ahead and failure is None and (following := next(chunks, None)):
                arrays_of = pool.submit(_encode_in_pool, folder, following.texts, dtype)
                in_flight.append((following, arrays_of))
        except ValueError as error:
            # The chunks before the bad row are committed first.
            failure = error
        if not in_flight:
            break
        chunk, arrays = in_flight.popleft()
        yield chunk, arrays.result()
    if failure:
        raise failure


def encode(tokenizer: Tokenizer, texts: Texts, dtype: str) -> Arrays:
    """Tokens of texts, each ended by the end-of-text id, in one array per split."""
    end = [tokenizer.end_of_text]

    def ids_of(part: list[str]) -> Iterator[Sequence[int]]:
        """Ids of consecutive pieces; short texts are encoded at once."""
        for long, texts in groupby(part, lambda text: len(text) > PIECE):
            if long:
                for text in texts:
                    yield from (tokenizer.encode([piece])[0] for piece in tokenizer.pieces(text))
                    yield end
            else:
                for ids in tokenizer.encode([*texts]):
                    yield ids
                    yield end

    def packed(part: list[str]) -> NDArray[Any]:
        return np.fromiter(chain.from_iterable(ids_of(part)), dtype)

    return {split: packed(part) for split, part in texts.items()}


def begin_process() -> None:
    """Set up a process of the pool, which imports this module and so no torch."""
    # Ctrl+C is handled by the first process alone. If that process is killed, this one ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_pool(folder: Path, texts: Texts, dtype: str) -> Arrays:
    return encode(_load_once(folder), texts, dtype)


_load_once = lru_cache(maxsize=1)(load_tokenizer)
