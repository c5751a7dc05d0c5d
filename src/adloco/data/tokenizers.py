"""Tokenizers: bytes, a byte-level BPE trained on the corpus, or any Hugging Face tokenizer by
folder or hub name.
"""

import copy
import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from adloco.errors import require

PROBE = "Hello, world!  The quick brown fox\n\tjumps over 13 lazy dogs. Ünïcödé"
END_OF_TEXT = "<|endoftext|>"
BARE_VOCABULARIES = {
    "merges.txt": "GPT2Tokenizer",
    "vocab.txt": "BertTokenizer",
    "tokenizer.model": "LlamaTokenizer",
}
"""Class in transformers for a folder that holds a vocabulary by this file and says nothing about
it.
"""

SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
"""Packages that a tokenizer.model is read with, by module."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int:
        """Id that ends each document."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Each text on its own, with the special tokens that a model expects around it, cut to so
        many tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def to_transformers(self, *, whole: bool) -> Any:
        """A tokenizer of transformers that encodes as `encode` does, or as `encode_whole` does."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs, into an existing folder."""
        ...

    def fingerprint(self) -> str:
        """Equal for tokenizers that encode alike."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; the zero byte ends a document (one inside a text reads as the end of a
    document).
    """

    vocab_size = 256
    end_of_text = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        return [[self.end_of_text, *ids][:max_tokens] for ids in self.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def to_transformers(self, *, whole: bool) -> Any:
        import tokenizers

        # A vocabulary of the bytes and no merges; the zero byte's place is taken by the token that
        # ends a document.
        names = {byte: name for name, byte in _names_of_bytes().items() if byte > 0}
        vocabulary = {END_OF_TEXT: 0, **{name: byte for byte, name in sorted(names.items())}}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        return _fast(tokenizer, whole)

    def save(self, folder: Path) -> None:
        (folder / "bytes.json").write_text("{}\n")

    def fingerprint(self) -> str:
        return "bytes"


class BytePairTokenizer:
    """A byte-level BPE of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.end_of_text: int = tokenizer.token_to_id(END_OF_TEXT)

    @staticmethod
    def train(texts: Sequence[str], vocab_size: int) -> "BytePairTokenizer":
        import tokenizers

        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return BytePairTokenizer(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        return [[self.end_of_text, *ids][:max_tokens] for ids in self.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def to_transformers(self, *, whole: bool) -> Any:
        import tokenizers

        return _fast(tokenizers.Tokenizer.from_str(self._tokenizer.to_str()), whole)

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "bpe.json"))

    def fingerprint(self) -> str:
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()


class PretrainedTokenizer:
    """A Hugging Face tokenizer; its end-of-sequence (or separator) token ends a document."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        ending = (
            tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        )
        require(
            ending is not None,
            f"data.tokenizer {name!r} has neither an end-of-sequence nor a separator token; use another",
        )
        self.end_of_text: int = ending

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # verbose=False: documents longer than the tokenizer's model are cut into windows later, no
        # reason to warn.
        encoded: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def encode_whole(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(
            list(texts), truncation=True, max_length=max_tokens, return_attention_mask=False
        )["input_ids"]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def to_transformers(self, *, whole: bool) -> Any:
        import tokenizers

        tokenizer = copy.deepcopy(self._tokenizer)
        if (
            not whole
            and tokenizer(PROBE)["input_ids"] != self.encode([PROBE])[0]
            and tokenizer.is_fast
        ):
            tokenizer.backend_tokenizer.post_processor = tokenizers.processors.Sequence(
                []
            )  # Documents were packed without special tokens.
        return tokenizer

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder / "pretrained")

    def fingerprint(self) -> str:
        vocabulary = json.dumps(sorted(self._tokenizer.get_vocab().items()))
        probe = self.encode([PROBE])
        return hashlib.sha256(f"{vocabulary}{probe}".encode()).hexdigest()


def _fast(tokenizer: Any, whole: bool) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    if whole:
        begin = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[begin]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # Text that happens to spell the token is text.
    )


def _names_of_bytes() -> dict[str, int]:
    """The byte that each printable character stands for in byte-level vocabularies (GPT-2's table)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def make_tokenizer(name: str, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer of a recipe: 'bytes', 'bpe:SIZE' (trained on these texts), or a folder or hub
    name.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        require(
            size.isdecimal() and int(size) > 256,
            f"data.tokenizer bpe needs a size above 256 as in bpe:2048, got {name!r}",
        )
        return BytePairTokenizer.train(texts, int(size))
    return _pretrained(name)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that was saved in this folder."""
    import tokenizers

    if (folder / "bytes.json").exists():
        return ByteTokenizer()
    if (folder / "bpe.json").exists():
        return BytePairTokenizer(tokenizers.Tokenizer.from_file(str(folder / "bpe.json")))
    require(
        (folder / "pretrained").exists(),
        f"{folder} holds no tokenizer; it is written by `adloco train`",
    )
    return _pretrained(str(folder / "pretrained"))


def _pretrained(name: str) -> Tokenizer:
    import transformers

    described = any(
        (Path(name) / file).exists()
        for file in ("tokenizer.json", "tokenizer_config.json", "config.json")
    )
    bare = next(
        (
            kind
            for file, kind in BARE_VOCABULARIES.items()
            if (Path(name) / file).exists() and not described
        ),
        "AutoTokenizer",
    )
    try:
        tokenizer = getattr(transformers, bare).from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and errors of hub clients here, in paragraphs.
        missing = [package for module, package in SENTENCEPIECE.items() if not _importable(module)]
        if missing and "tiktoken" in str(error):
            # What transformers tries last, and then blames.
            needed = f"data.tokenizer {name!r} needs {' and '.join(missing)} to be read"
            raise ValueError(
                f"{needed}; install with: pip install 'adloco[sentencepiece]'"
            ) from error
        advice = "download it and give its folder, or set bytes or bpe:SIZE"
        raise ValueError(
            f"data.tokenizer {name!r} could not be loaded ({type(error).__name__}); {advice}"
        ) from error
    return PretrainedTokenizer(tokenizer, name)


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
