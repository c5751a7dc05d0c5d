"""Tokens of a corpus, packed once into memory-mapped files, keyed by content and tokenizer, written atomically."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adloco.training.data.corpus import Corpus, load_corpus
from adloco.training.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from adloco.training.settings import DataSettings

DOCUMENTS_AT_ONCE = 256
FORMAT = 1
META = "meta.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Train and validation tokens of a corpus, each document followed by the end-of-text id."""

    folder: Path
    corpus: str
    """Equal for equal text, whatever the tokenizer."""
    train: NDArray[Any]
    validation: NDArray[Any]
    tokenizer: Tokenizer

    def everything(self) -> NDArray[Any]:
        """All tokens, train and validation."""
        return np.concatenate([self.train, self.validation])


def open_cache(data: DataSettings, tokenizer: Tokenizer | None = None) -> TokenCache:
    """The tokens of a corpus, read and packed now if this is the first time; with the recipe's tokenizer unless one is given."""
    corpus = load_corpus(data.path, data.text_column, data.validation_fraction)
    # A tokenizer trained on the corpus follows from the corpus and its name; any other is part of the key by what it does.
    if tokenizer is None and not data.tokenizer.startswith("bpe:"):
        tokenizer = make_tokenizer(data.tokenizer, ())
    text = _corpus_key(corpus)
    tokens = hashlib.sha256((tokenizer.fingerprint() if tokenizer else data.tokenizer).encode()).hexdigest()[:8]
    folder = Path(data.cache).expanduser() / f"{text}-{tokens}"
    if not _complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _write(folder, corpus, tokenizer or make_tokenizer(data.tokenizer, corpus.train))
        except OSError as error:
            raise ValueError(f"data.cache {data.cache!r} cannot be written ({error.strerror}); use another folder (recipe section [data])") from error
    meta = json.loads((folder / META).read_text())
    return TokenCache(
        folder=folder,
        corpus=text,
        train=np.memmap(folder / "train.bin", dtype=meta["dtype"], mode="r", shape=(meta["train"],)),
        validation=np.memmap(folder / "validation.bin", dtype=meta["dtype"], mode="r", shape=(meta["validation"],)),
        tokenizer=load_tokenizer(folder),
    )


def _corpus_key(corpus: Corpus) -> str:
    digest = hashlib.sha256(f"{FORMAT} {len(corpus.train)}\n".encode())
    for document in (*corpus.train, *corpus.validation):
        # Lengths first, so that no two lists of documents give the same bytes.
        content = document.encode("utf-8")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:24]


def _complete(folder: Path) -> bool:
    """Whether a cache is there and its files have the sizes they had when it was written."""
    if not (folder / META).exists():
        return False
    meta = json.loads((folder / META).read_text())
    sizes = {split: meta[split] * np.dtype(meta["dtype"]).itemsize for split in SPLITS}
    return all((folder / f"{split}.bin").exists() and (folder / f"{split}.bin").stat().st_size == size for split, size in sizes.items())


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    try:
        tokenizer.save(temporary)
        counts = {split: _pack(temporary / f"{split}.bin", getattr(corpus, split), tokenizer, dtype) for split in SPLITS}
        (temporary / META).write_text(json.dumps({"dtype": dtype, **counts}))
        temporary.replace(folder)
    except OSError:
        # Another process may have written the same content in the meantime; then theirs is as good.
        if not _complete(folder):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _pack(file: Path, documents: Sequence[str], tokenizer: Tokenizer, dtype: str) -> int:
    count = 0
    with file.open("wb") as out:
        for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
            for ids in tokenizer.encode(documents[start : start + DOCUMENTS_AT_ONCE]):
                np.array([*ids, tokenizer.end_of_text], dtype=dtype).tofile(out)
                count += len(ids) + 1
    return count
