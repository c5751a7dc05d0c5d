"""Token caches: folders that keep the tokens of a source, and the windows that a run reads from
them.

Tokens are added to a cache when they are first needed. Its folder is named by two digests. The
first is of the text itself for text in memory (a path, the default corpus); for a dataset it is of
the settings that select the rows, and of the files of a local one, so that a prepared dataset is
found without a network. The second is of the tokenizer.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from adloco.algorithms.method import Source
from adloco.data.data_settings import DataSettings
from adloco.data.feeds import Corpus, dataset_chunks, load_corpus
from adloco.data.files import cache_folder
from adloco.data.hub import local_fingerprint
from adloco.data.rows import left_out, read_rows
from adloco.data.sources import StreamSource, TokenSource
from adloco.data.token_bytes import TokenBytes
from adloco.data.token_store import FORMAT, State, TokenStore
from adloco.data.tokenizers import Tokenizer, make_tokenizer

TEXT_FORMAT = 2
"""Version of the digests of texts."""
TOKENIZER_ROWS = 10_000
"""Rows of a dataset on which bpe:SIZE is trained."""


class TokenCache:
    """Train and validation tokens of a source; the end-of-text id follows each document."""

    def __init__(
        self,
        data: DataSettings,
        store: TokenStore,
        content: str,
        skipped: Mapping[str, int] | None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Make a cache from its parts; `open_cache` and `begin_cache` do this for a recipe.

        Args:
            data: Names the source.
            store: The files of tokens, and how they grow.
            content: Digest of the text, if it is in memory; else empty.
            skipped: Reason -> rows left out when the source was read just now; None if it was not.
            tokenizer: The tokenizer to use; None: the one that is stored with the tokens.
        """
        self.data = data
        self.store = store
        self.folder = store.folder
        # Of tokenizers that encode alike, it decodes and is exported as the recipe's own one is.
        self.tokenizer = tokenizer or store.tokenizer
        self._content = content
        self._skipped = skipped

    @property
    def corpus(self) -> str:
        """Fingerprint of the text, whatever the tokenizer; of a stream, of the text so far."""
        return self._content or self.store.state.corpus

    def matches_fingerprint(self, corpus: str) -> bool:
        """True if the text is the one with this fingerprint, or begins with it.

        Args:
            corpus: An earlier value of `corpus`. To compare, as much of the source is read as that
                value stands for.
        """
        chunks, _, digest = corpus.partition(":")
        if self._content or not chunks.isdecimal() or int(chunks) == 0:
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

    def train_windows(self, context_tokens: int, at_least: int) -> int:
        """Number of windows to train on.

        Args:
            context_tokens: Length of a window, less one token.
            at_least: For a stream, windows to fetch; the number is then of those so far.
        """
        tokens = self.at_least(at_least * context_tokens + 1) if self.data.streaming else self.train
        return max(0, (len(tokens) - 1) // context_tokens)

    def train_source(self, *, context_tokens: int, num_streams: int, seed: int) -> Source:
        """The source of windows to train on; `seed` sets their order, except for a stream."""
        if self.data.streaming:
            return StreamSource(
                self.at_least, context_tokens=context_tokens, num_streams=num_streams
            )
        return TokenSource(
            self.train, context_tokens=context_tokens, num_streams=num_streams, seed=seed
        )

    def at_least(self, tokens: int) -> NDArray[Any]:
        """Fetch train tokens until there are this many, or the source ends; returns all so far."""
        _exhaust(self.store.grow(lambda state: state.train >= tokens))
        return self.train

    def rows_read(self) -> int | None:
        """Rows of a stream that are in the cache, those left out included; None if the source was
        read before training.
        """
        return self.store.state.rows if self.data.streaming else None

    def skipped(self) -> str:
        """A sentence about the rows left out so far, and characters that the tokenizer lost; empty
        if there are none.
        """
        state = self.store.state
        # The cache may have been made from a source with equal text but other bad rows.
        counts = state.skipped if self._skipped is None else self._skipped
        rows = left_out(counts, state.documents + sum(counts.values()))
        lost = self.lost()
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

    Args:
        data: Names the source.
        tokenizer: Replaces the tokenizer of `data`.

    Raises:
        ValueError: The source cannot be read or contains no text, or the cache cannot be written.
    """
    cache = begin_cache(data, tokenizer)
    _exhaust(
        cache.store.grow(
            (lambda state: _validation_is_read(data, state))
            if data.streaming
            else (lambda state: state.complete)
        )
    )
    return cache


def begin_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """Open the cache of a source as it is, perhaps empty; arguments as for `open_cache`."""
    # A tokenizer that is trained on the text is determined by the text and data.tokenizer. Any
    # other enters the folder's name by its fingerprint.
    own = data.tokenizer.startswith("bpe:")
    if tokenizer is None and not own:
        tokenizer = make_tokenizer(data.tokenizer, ())
    corpus = None if data.dataset else load_corpus(data)
    content = _corpus_key(corpus) if corpus else ""
    named = data.tokenizer if tokenizer is None or (own and not corpus) else tokenizer.fingerprint()
    cache = cache_folder(data.cache)
    encoded = hashlib.sha256(f"{FORMAT} {named}".encode()).hexdigest()[:8]
    folder = cache / f"{content or _dataset_key(data)}-{encoded}"
    feed = corpus.chunks if corpus else partial(dataset_chunks, data)
    try:
        store = TokenStore(
            folder,
            feed,
            data.source,
            lambda: (
                tokenizer
                or make_tokenizer(data.tokenizer, corpus.train if corpus else _sample(data))
            ),
        )
    except OSError as error:
        raise ValueError(
            f"data.cache {data.cache or str(cache)!r} cannot be written ({error.strerror}); use "
            "another folder (recipe section [data])"
        ) from error
    return TokenCache(data, store, content, corpus.skipped if corpus else None, tokenizer)


def _validation_is_read(data: DataSettings, state: State) -> bool:
    """True if all rows to validate on have been read."""
    return state.stage > 0 or (not data.validation_split and state.row >= data.validation_samples)


def _corpus_key(corpus: Corpus) -> str:
    digest = hashlib.sha256(f"{TEXT_FORMAT} {len(corpus.train)}\n".encode())
    for document in (*corpus.train, *corpus.validation):
        # Lengths first, so that no two lists of documents give the same bytes.
        content = document.encode("utf-8")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:24]


def _dataset_key(data: DataSettings) -> str:
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
        json.dumps([TEXT_FORMAT, *asked, held_out, local_fingerprint(data.dataset)]).encode()
    ).hexdigest()[:24]


def _sample(data: DataSettings) -> list[str]:
    return [
        row[data.text_column]
        for row in islice(read_rows(data, "train", {data.text_column: str}), TOKENIZER_ROWS)
    ]


def _exhaust(states: Iterator[State]) -> None:
    for _ in states:
        pass
