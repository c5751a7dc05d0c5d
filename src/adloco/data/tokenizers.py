"""Tokenizers by name: the bytes of UTF-8, a byte-level BPE trained on the text, or any tokenizer of
Hugging Face by folder or hub name.

All but the bytes are one class around a `PreTrainedTokenizerFast` of transformers. transformers is
imported only when one of them is made.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adloco.data.byte_tokenizer import BYTES, ByteTokenizer
from adloco.data.text_pieces import pieces_of_words
from adloco.data.transformers_tokenizer import (
    END_OF_TEXT,
    PRETRAINED,
    TransformersTokenizer,
    byte_level,
    load_pretrained,
)
from adloco.errors import require


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    """Number of ids; all ids are below it."""
    end_of_text: int
    """Id that ends each document."""
    padding: int
    """Id that fills the texts of a batch up to the longest; may be `end_of_text`."""
    unknown: int | None
    """Id for what the vocabulary lacks; None if the tokenizer has none of its own."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it."""

    def pieces(self, text: str) -> Iterator[str]:
        """Pieces of a long text whose ids, one after another, are those of the text; the text
        itself if the tokenizer's rules do not say where it can be divided.
        """

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """The ids of each text as a sample of its own, with the special tokens a model expects,
        and cut at `max_tokens`, these included.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""

    def id_bytes(self) -> NDArray[np.float64]:
        """UTF-8 bytes of the text that each id stands for, [vocab_size]; nan if not known."""

    def to_transformers(self, *, whole: bool) -> Any:
        """A tokenizer of transformers with the same ids, that encodes as `encode_whole` does if
        `whole`, else as `encode`.
        """

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs into an existing folder."""

    def fingerprint(self) -> str:
        """A text that is equal for tokenizers that encode and end texts alike."""


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that a recipe names.

    Args:
        name: "bytes", "bpe:SIZE", or the folder or hub name of a Hugging Face tokenizer.
        texts: What bpe:SIZE is trained on.

    Raises:
        ValueError: The name is none of these, or the tokenizer cannot be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("bpe:"):
        digits = name.removeprefix("bpe:")
        size = int(digits) if re.fullmatch(r"[0-9]{1,7}", digits) else 0
        require(
            size > 256,
            "data.tokenizer bpe needs a size above 256 and below 10 million, as in bpe:2048, got "
            f"{name!r}",
        )
        return _trained(texts, size, name)
    return load_pretrained(name)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote into this folder; ValueError if none is."""
    if (folder / BYTES).exists():
        return ByteTokenizer()
    require(
        (folder / PRETRAINED).exists(),
        f"{folder} holds no tokenizer; it is written by `adloco train`",
    )
    return load_pretrained(str(folder / PRETRAINED))


def _trained(texts: Iterable[str], vocab_size: int, name: str) -> Tokenizer:
    """A byte-level BPE, trained on these texts."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(pieces_of_words, texts)), trainer)
    return TransformersTokenizer(byte_level(tokenizer), name)
