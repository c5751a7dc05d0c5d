"""Token caches: folders that keep the tokens of a source, from which a run reads windows.

Tokens are added to a cache when they are first needed. Its folder is named by two digests. The
first is of the settings that select the rows and of the source (`source_digest`), so that a
prepared text is found without reading it, and a prepared dataset without a network. The second is
of the tokenizer.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from adloco.algorithms.method import Source
from adloco.data.data_settings import DataSettings
from adloco.data.encoding import begin_process
from adloco.data.feeds import chunks_after, texts_of
from adloco.data.files import cache_folder, reads
from adloco.data.rows import Position, left_out, stages
from adloco.data.source_digest import source_digest
from adloco.data.sources import StreamSource, TokenSource
from adloco.data.token_bytes import TokenBytes
from adloco.data.token_store import FORMAT, State, TokenStore, intact
from adloco.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from adloco.errors import require

KEY_FORMAT = 3
"""Version of the digests of sources."""
TOKENIZER_TEXTS = 10_000
"""Texts on which bpe:SIZE is trained."""
CHUNKS_PER_PROCESS = 2
"""Chunks of rows in flight for each process, so that no process waits for the writer."""


class TokenCache:
    """Train and validation tokens of a source; the end-of-text id follows each document."""

    def __init__(
        self, data: DataSettings, store: TokenStore, tokenizer: Tokenizer | None = None
    ) -> None:
        """Make a cache from its parts; `open_cache` and `begin_cache` do this for a recipe.

        tokenizer: The tokenizer to use; None: the one that is stored with the tokens.
        """
        self.data = data
        self.store = store
        self.folder = store.folder
        # Of tokenizers that encode alike, it decodes and is exported as the recipe's own one is.
        self.tokenizer = tokenizer or store.tokenizer

    @property
    def corpus(self) -> str:
        """Fingerprint of the text, whatever the tokenizer; of a stream, of the text so far."""
        return self.store.state.corpus

    def matches_fingerprint(self, corpus: str) -> bool:
        """True if the text is the one with this fingerprint; of a stream, if it begins with it.

        corpus: An earlier value of `corpus`. As much of the source is read as it stands for.
        """
        chunks, _, digest = corpus.partition(":")
        if not self.data.streaming or not chunks.isdecimal() or int(chunks) == 0:
            return self.corpus == corpus
        _exhaust(self.store.grow(lambda state: state.chunks >= int(chunks)))
        return self.store.state.chunks >= int(chunks) and self.store.digest(int(chunks)) == digest

    @property
    def train(self) -> NDArray[Any]:
        """All train tokens made so far."""
        return self.store.tokens("train")

    @property
    def validation(self) -> NDArray[Any]:
        return self.store.tokens("validation")

    def train_windows(self, at_least: int) -> int:
        """Number of windows to train on.

        at_least: For a stream, windows to fetch; the number is then of those so far.
        """
        context = self.data.context_tokens
        tokens = self.at_least(at_least * context + 1)
        return max(0, (len(tokens) - 1) // context)

    def train_source(self, *, num_streams: int, seed: int) -> Source:
        """The source of windows to train on; `seed` sets their order, except for a stream."""
        context = self.data.context_tokens
        if self.data.streaming:
            return StreamSource(self.at_least, context_tokens=context, num_streams=num_streams)
        return TokenSource(self.train, context_tokens=context, num_streams=num_streams, seed=seed)

    def at_least(self, tokens: int) -> NDArray[Any]:
        """Fetch train tokens until there are this many, or the source ends; returns all so far."""
        _exhaust(self.store.grow(lambda state: state.train >= tokens))
        return self.train

    def rows_read(self) -> int | None:
        """Rows of a stream so far, also those left out; None if all are read before training."""
        return self.store.state.rows if self.data.streaming else None

    def skipped(self) -> str:
        """A sentence about rows left out and characters that the tokenizer lost; empty if none."""
        rows, lost = left_out(self.store.state.skipped, self.store.state.rows), self.lost()
        said = (
            f"the tokenizer drops or changes characters: its tokens differ by {lost:,} bytes from "
            "the text that is held out, so bits per byte are not known"
        )
        return "; ".join(filter(None, [rows, said if lost else ""]))

    def lost(self) -> int:
        """Bytes of the texts to validate on that their tokens do not stand for."""
        state = self.store.state
        return TokenBytes.of(self.tokenizer).lost(
            self.validation, state.validation_documents, state.validation_bytes
        )


def open_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """Open the cache of a source, and tokenise what it does not contain yet.

    For a stream, only the rows to validate on are read now; others are read when they are needed.

    tokenizer: Replaces the tokenizer of `data`.

    Raises:
        ValueError: The source cannot be read or contains no text, or the cache cannot be written.
    """

    def enough(state: State) -> bool:
        """True if all rows were read; of a stream, all those to validate on."""
        if not data.streaming:
            return state.complete
        held_out = not data.validation_split and state.row >= data.validation_samples
        return state.stage > 0 or held_out

    cache = begin_cache(data, tokenizer)
    _exhaust(cache.store.grow(enough))
    return cache


def begin_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """Open the cache of a source as it is, perhaps empty; arguments as for `open_cache`."""
    own = data.tokenizer.startswith("bpe:")
    if tokenizer is None and not own:
        tokenizer = make_tokenizer(data.tokenizer, ())
    root = cache_folder(data.cache)
    require(
        not reads(data, root),
        f"data.cache {data.cache or str(root)!r} is in {data.source}, and would be read as text; "
        "use another folder",
    )
    key = _source_key(data)

    def named(by: str) -> Path:
        return root / f"{key}-{hashlib.sha256(f'{FORMAT} {by}'.encode()).hexdigest()[:8]}"

    folder = named(tokenizer.fingerprint() if tokenizer else data.tokenizer)
    if tokenizer and own:
        # A tokenizer that was trained on the text is determined by the text and data.tokenizer, but
        # this one may have been trained on another text.
        by_name = named(data.tokenizer)
        if intact(by_name) and load_tokenizer(by_name).fingerprint() == tokenizer.fingerprint():
            folder = by_name
    try:
        store = TokenStore(
            folder,
            partial(chunks_after, data),
            data.source,
            lambda: tokenizer or make_tokenizer(data.tokenizer, _sample(data)),
        )
    except OSError as error:
        raise ValueError(
            f"data.cache {data.cache or str(root)!r} cannot be written ({error.strerror}); use "
            "another folder (recipe section [data])"
        ) from error
    return TokenCache(data, store, tokenizer)


def fill(cache: TokenCache, processes: int) -> Iterator[State]:
    """Fill a cache before training (`adloco prepare`), continuing from its content; yields its
    state first and after each chunk. What it holds then does not depend on the number of processes.

    processes: Processes that tokenise, while this one reads and writes; 1: this one does it.

    Raises:
        ValueError: The source cannot be read.
    """
    yield cache.store.state
    pool = None
    if processes > 1:  # It starts them when it is given the first chunk.
        spawned = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, spawned, begin_process)
    try:
        ahead = CHUNKS_PER_PROCESS * processes
        yield from cache.store.grow(lambda state: state.complete, pool, ahead)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _source_key(data: DataSettings) -> str:
    asked = [
        data.dataset,
        data.config,
        data.split,
        data.validation_split,
        data.samples,
        data.validation_samples,
        data.text_column,
        data.bad_rows,
    ]
    fraction = data.validation_fraction
    held_out = None if data.validation_split or data.validation_samples else fraction
    return hashlib.sha256(
        json.dumps([KEY_FORMAT, *asked, held_out, source_digest(data)]).encode()
    ).hexdigest()[:24]


def _sample(data: DataSettings) -> Iterator[str]:
    parts = texts_of(data, stages(data)[-1], Position())
    return islice((text for _, each in parts for text in each.get("train", ())), TOKENIZER_TEXTS)


def _exhaust(states: Iterator[State]) -> None:
    for _ in states:
        pass
