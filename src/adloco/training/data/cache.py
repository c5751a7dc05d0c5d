"""Tokens of a corpus, packed once into memory-mapped files, keyed by content and tokenizer, written atomically."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adloco.training.data.corpus import Corpus
from adloco.training.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

DOCUMENTS_AT_ONCE = 256
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Train and validation tokens of a corpus, each document followed by the end-of-text id."""

    folder: Path
    train: NDArray[Any]
    validation: NDArray[Any]
    tokenizer: Tokenizer


def token_cache(corpus: Corpus, tokenizer_name: str, root: Path) -> TokenCache:
    """The cached tokens of this corpus, made now if they are not there yet.

    A tokenizer trained on the corpus (bpe:SIZE) is trained once and kept with the tokens; a pretrained one is part of the key by its content.
    """
    trained_here = tokenizer_name.startswith("bpe:")
    tokenizer = None if trained_here else make_tokenizer(tokenizer_name, corpus.train)
    key = _key(corpus, tokenizer_name if tokenizer is None else tokenizer.fingerprint())
    folder = root / key
    if not (folder / "meta.json").exists():
        _write(folder, corpus, tokenizer or make_tokenizer(tokenizer_name, corpus.train))
    meta = json.loads((folder / "meta.json").read_text())
    return TokenCache(
        folder=folder,
        train=np.memmap(folder / "train.bin", dtype=meta["dtype"], mode="r", shape=(meta["train"],)),
        validation=np.memmap(folder / "validation.bin", dtype=meta["dtype"], mode="r", shape=(meta["validation"],)),
        tokenizer=load_tokenizer(folder),
    )


def _key(corpus: Corpus, tokenizer: str) -> str:
    digest = hashlib.sha256(f"{FORMAT} {tokenizer} {len(corpus.train)}\n".encode())
    for document in (*corpus.train, *corpus.validation):
        # Lengths first, so that no two lists of documents give the same bytes.
        data = document.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    try:
        tokenizer.save(temporary)
        counts = {split: _pack(temporary / f"{split}.bin", getattr(corpus, split), tokenizer, dtype) for split in ("train", "validation")}
        (temporary / "meta.json").write_text(json.dumps({"dtype": dtype, **counts}))
        os.replace(temporary, folder)
    except OSError:
        # Another process may have written the same content in the meantime; then theirs is as good.
        if not (folder / "meta.json").exists():
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
