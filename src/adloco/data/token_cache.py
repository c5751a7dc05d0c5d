"""Token caches: which folder holds the tokens of a source, made now if they are not there, and the
windows a run reads from them.

Text in memory (a path, the default corpus) is named by its content; a dataset by what was asked
for, and by the files of a local one, so that a prepared one is found without a network. Either name
is followed by the tokenizer's.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adloco.algorithms.method import Source
from adloco.data.corpus import Corpus, load_corpus
from adloco.data.data_file import SourceUnreachableError
from adloco.data.data_settings import DataSettings
from adloco.data.feeds import corpus_feed, dataset_feed
from adloco.data.hub import local_fingerprint
from adloco.data.rows import left_out, read_rows
from adloco.data.sources import StreamSource, TokenSource
from adloco.data.token_store import State, TokenStore
from adloco.data.tokenizers import Tokenizer, make_tokenizer

FORMAT = 1
TOKENIZER_ROWS = 10_000
"""Rows of a dataset on which bpe:SIZE is trained."""


class TokenCache:
    """Train and validation tokens of a source, each document followed by the end-of-text id."""

    def __init__(
        self,
        data: DataSettings,
        growth: TokenStore,
        content: str,
        skipped: Mapping[str, int] | None,
    ) -> None:
        """skipped: what was left out when the source was read just now, where it was."""
        self.data = data
        self.growth = growth
        self.folder = growth.folder
        self.tokenizer = growth.tokenizer
        self._content = content
        self._skipped = skipped

    @property
    def corpus(self) -> str:
        """Equal for equal text, whatever the tokenizer; of a stream, for equal text so far."""
        return self._content or self.growth.state.corpus

    def matches_fingerprint(self, corpus: str) -> bool:
        """True if the text is the one that had this `corpus`, or goes on from it."""
        chunks, _, digest = corpus.partition(":")
        if self._content or not chunks.isdecimal() or int(chunks) == 0:
            return self.corpus == corpus
        _exhaust(self.growth.grow(lambda state: state.chunks >= int(chunks)))
        return self.growth.state.chunks >= int(chunks) and self.growth.digest(int(chunks)) == digest

    @property
    def train(self) -> NDArray[Any]:
        """The tokens to train on so far."""
        return self.growth.tokens("train")

    @property
    def validation(self) -> NDArray[Any]:
        return self.growth.tokens("validation")

    def everything(self) -> NDArray[Any]:
        """All tokens, train and validation."""
        return np.concatenate([self.train, self.validation])

    def train_windows(self, context_tokens: int, at_least: int) -> int:
        """How many windows there are to train on; of a stream, only as far as `at_least` asks to
        know.
        """
        tokens = self.at_least(at_least * context_tokens + 1) if self.data.streaming else self.train
        return max(0, (len(tokens) - 1) // context_tokens)

    def train_source(self, *, context_tokens: int, num_streams: int, seed: int) -> Source:
        """Windows to train on, in as many streams."""
        if self.data.streaming:
            return StreamSource(
                self.at_least, context_tokens=context_tokens, num_streams=num_streams
            )
        return TokenSource(
            self.train, context_tokens=context_tokens, num_streams=num_streams, seed=seed
        )

    def at_least(self, tokens: int) -> NDArray[Any]:
        """The train tokens so far, after fetching so many; fewer only at the end of the source."""
        _exhaust(self.growth.grow(lambda state: state.train >= tokens))
        return self.train

    def skipped(self) -> str:
        """What was left out so far, in one sentence; empty if nothing was."""
        state = self.growth.state
        # Equal text may have been read before from a source without, or with, bad rows.
        counts = state.skipped if self._skipped is None else self._skipped
        return left_out(counts, state.documents + sum(counts.values()))


def open_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """The tokens of a source, read and packed now as far as they are not yet; with the recipe's
    tokenizer unless one is given.

    Of a stream only what validates is read; the rest follows as it is asked for.

    """
    cache = begin_cache(data, tokenizer)
    _exhaust(
        cache.growth.grow(
            (lambda state: _validation_stands(data, state))
            if data.streaming
            else (lambda state: state.complete)
        )
    )
    return cache


def begin_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """The cache as it stands, perhaps empty."""
    # A tokenizer trained on the text follows from the text and its name; any other is part of the
    # key by what it does.
    own = data.tokenizer.startswith("bpe:")
    if tokenizer is None and not own:
        tokenizer = make_tokenizer(data.tokenizer, ())
    corpus = None if data.dataset else load_corpus(data)
    content = _corpus_key(corpus) if corpus else ""
    named = data.tokenizer if tokenizer is None or (own and not corpus) else tokenizer.fingerprint()
    folder = (
        Path(data.cache).expanduser()
        / f"{content or _dataset_key(data)}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"
    )
    feed = corpus_feed(corpus) if corpus else dataset_feed(data)
    try:
        growth = TokenStore(
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
            f"data.cache {data.cache!r} cannot be written ({error.strerror}); use another folder "
            "(recipe section [data])"
        ) from error
    return TokenCache(data, growth, content, corpus.skipped if corpus else None)


def reachable(data: DataSettings) -> str:
    """Empty if the source can be read, or if the recipe names no fallback for it; else the sentence
    that the fallback is used, and why.
    """
    if not data.fallback:
        return ""
    try:
        cache = begin_cache(data)
        if data.dataset and not cache.growth.state.complete:
            next(iter(read_rows(data, "train", {data.text_column: str})), None)
    except SourceUnreachableError as error:
        return (
            f"ATTENTION: data.fallback {data.fallback!r} is used instead of {data.source}, which "
            f"cannot be reached ({error})"
        )
    return ""


def _validation_stands(data: DataSettings, state: State) -> bool:
    """True if all rows to validate on have been read."""
    return state.stage > 0 or (not data.validation_split and state.row >= data.validation_samples)


def _corpus_key(corpus: Corpus) -> str:
    digest = hashlib.sha256(f"{FORMAT} {len(corpus.train)}\n".encode())
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
    held_out = (
        None if data.validation_split or data.validation_samples else data.validation_fraction
    )
    return hashlib.sha256(
        json.dumps([FORMAT, *asked, held_out, local_fingerprint(data.dataset)]).encode()
    ).hexdigest()[:24]


def _sample(data: DataSettings) -> list[str]:
    return [
        row[data.text_column]
        for row in islice(read_rows(data, "train", {data.text_column: str}), TOKENIZER_ROWS)
    ]


def _exhaust(states: Iterator[State]) -> None:
    for _ in states:
        pass
