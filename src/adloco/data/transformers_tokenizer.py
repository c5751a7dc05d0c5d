"""A wrapper for any tokenizer of transformers, and how such a tokenizer is made or loaded."""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adloco.data.text_pieces import pieces_of_words
from adloco.errors import require
from adloco.hub_access import hub_asked

END_OF_TEXT = "<|endoftext|>"
PRETRAINED = "pretrained"
"""Folder in which a tokenizer of transformers is saved."""
MOST_IDS = 1 << 24
"""Largest number of ids of a model (model.vocab_size), more than any vocabulary has."""

PROBE = "Hello, world!  The quick brown fox\n\tjumps over 13 lazy dogs. Ünïcödé"
"""Text on which tokenizers are compared."""
BARE_VOCABULARIES = {
    "merges.txt": "GPT2Tokenizer",
    "vocab.txt": "BertTokenizer",
    "tokenizer.model": "LlamaTokenizer",
}
"""Vocabulary file -> class of transformers, for a folder without a file that names the class."""
KEPT = (
    *("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces"),
    *("split_special_tokens", "model_input_names", "chat_template", "extra_special_tokens"),
)
"""What a tokenizer of transformers has beside its backend and its named special tokens."""
BYTE_LEVEL_SPACE = "\u0120"
"""The space as byte-level tokenizers write it; each character of their vocabulary is a byte."""
SINGLE_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A byte of a character that the vocabulary lacks, as other tokenizers write it."""


class TransformersTokenizer:
    """A tokenizer of transformers, usually a `PreTrainedTokenizerFast`.

    Its end-of-sequence token (or its separator token if it has none) ends a document.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        """
        name: What data.tokenizer calls it, for error messages.

        Raises:
            ValueError: The tokenizer has no token that can end a document.
        """
        self._tokenizer = tokenizer
        # Ids may have gaps, so the number of tokens is not enough.
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
        require(
            self.vocab_size < MOST_IDS,
            f"data.tokenizer {name!r} has an id of {self.vocab_size - 1:,}; ids must be below "
            f"{MOST_IDS:,}: use another",
        )
        sentence_end = tokenizer.eos_token_id
        ending = tokenizer.sep_token_id if sentence_end is None else sentence_end
        require(
            ending is not None,
            f"data.tokenizer {name!r} has neither an end-of-sequence nor a separator token; "
            "use another",
        )
        self.end_of_text: int = ending
        own = tokenizer.pad_token_id
        self.padding: int = ending if own is None else own
        # The unknown token of GPT-2 is the one that ends a text.
        unknown = tokenizer.unk_token_id
        self.unknown: int | None = None if unknown == ending else unknown

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer.is_fast:
            # transformers would note where in the text each token is, for a third of the time.
            backend = self._tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
            rows = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [row.ids for row in rows]
        # verbose=False: transformers would warn of documents longer than the model's context, which
        # are cut into windows later.
        encoded: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def pieces(self, text: str) -> Iterator[str]:
        return pieces_of_words(text) if self._divides_words() else iter([text])

    def _divides_words(self) -> bool:
        """True if no token crosses the ends of `pieces_of_words`."""
        import tokenizers

        if not self._tokenizer.is_fast:
            return False
        backend, own = self._tokenizer.backend_tokenizer, self._tokenizer
        words = backend.pre_tokenizer
        plain = isinstance(words, tokenizers.pre_tokenizers.ByteLevel)
        if not plain or words.add_prefix_space or not words.use_regex or backend.normalizer:
            return False
        # A token of its own may take the white space beside it, or have some inside.
        return not any(
            added.lstrip or added.rstrip or re.search(r"\s", added.content)
            for added in own.added_tokens_decoder.values()
        )

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(
            list(texts), truncation=True, max_length=max_tokens, return_attention_mask=False
        )["input_ids"]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def id_bytes(self) -> NDArray[np.float64]:
        sizes = np.full(self.vocab_size, np.nan)
        # A tokenizer in plain Python, or one that joins words with spaces, has no decoder.
        decoder = self._tokenizer.is_fast and self._tokenizer.backend_tokenizer.decoder
        if not decoder:
            return sizes
        byte_level = decoder.decode([BYTE_LEVEL_SPACE]) == " "
        # A space at the beginning of a text may be left out, so a letter comes before each piece.
        letter = self._tokenizer.tokenize("a")
        least = len(decoder.decode(letter).encode())
        for piece, number in self._tokenizer.get_vocab().items():
            if byte_level:
                sizes[number] = len(piece)
            elif SINGLE_BYTE.fullmatch(piece):
                sizes[number] = 1
            else:
                sizes[number] = len(decoder.decode([*letter, piece]).encode()) - least
        for number, added in self._tokenizer.added_tokens_decoder.items():
            # `encode` adds no special tokens, so their characters are in the text.
            sizes[number] = len(added.content.encode())
        return sizes

    def to_transformers(self, *, whole: bool) -> Any:
        tokenizer = copy.deepcopy(self._tokenizer)
        adds_special_tokens = tokenizer(PROBE)["input_ids"] != self.encode([PROBE])[0]
        if not whole and adds_special_tokens and tokenizer.is_fast:
            return without_special_tokens(tokenizer)
        return tokenizer

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder / PRETRAINED)

    def fingerprint(self) -> str:
        own = self._tokenizer
        parts = [
            self.encode([PROBE]),  # Before the backend is asked: it ends truncation and padding.
            own.backend_tokenizer.to_str() if own.is_fast else sorted(own.get_vocab().items()),
            own.special_tokens_map,
            own.split_special_tokens,
        ]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def byte_level(tokenizer: Any) -> Any:
    """Turn a byte-level tokenizer of the `tokenizers` library into one of transformers.

    Its only special token is the end-of-text token, which it puts before each text. The characters
    of that token inside a text are text.

    tokenizer: Has that token in its vocabulary; its decoder and post-processor are replaced.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def without_special_tokens(tokenizer: Any) -> Any:
    """A fast tokenizer that adds no special tokens, made of this one; packed documents have none.

    It is of no class of its own: a BertTokenizer makes its post-processor again when it is loaded.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    backend.post_processor = tokenizers.processors.Sequence([])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **tokenizer.special_tokens_map,
        **{name: getattr(tokenizer, name) for name in KEPT},
    )


def load_pretrained(name: str) -> TransformersTokenizer:
    """Load a tokenizer from a folder or from the hub; ValueError if it cannot be loaded."""
    import transformers

    folder = Path(name)
    naming = ("tokenizer.json", "tokenizer_config.json", "config.json")
    names_its_class = any((folder / file).exists() for file in naming)
    bare = [kind for file, kind in BARE_VOCABULARIES.items() if (folder / file).exists()]
    loader = bare[0] if bare and not names_its_class else "AutoTokenizer"
    silent = ""
    try:
        with hub_asked(name) as silent:
            tokenizer = getattr(transformers, loader).from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # transformers raises OSError, ValueError, ImportError and errors of hub clients here, with
        # long messages, which do not name the packages that a tokenizer.model needs.
        raise ValueError(
            f"data.tokenizer {name!r} could not be loaded ({silent or type(error).__name__}); "
            "download it and give its folder (for a tokenizer.model also pip install "
            "'adloco[sentencepiece]'), or set bytes or bpe:SIZE"
        ) from error
    found = TransformersTokenizer(tokenizer, name)
    try:
        tokenizer.tokenize("a")
        found.decode(found.encode([PROBE])[0])
        found.encode_whole([PROBE], len(PROBE))
    except Exception as error:  # Files that do not fit together are found when they are used.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ValueError(
            f"data.tokenizer {name!r} cannot encode a text ({reason}); mend its files, or use "
            "another"
        ) from error
    return found
