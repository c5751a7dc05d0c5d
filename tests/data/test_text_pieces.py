"""Long texts are tokenised piece by piece, with the tokens of the whole."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from adloco.data import byte_tokenizer, encoding, feeds, files, text_pieces
from adloco.data.data_settings import DataSettings
from adloco.data.encoding import encode
from adloco.data.token_cache import open_cache
from adloco.data.token_store import State
from adloco.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from tests.data.reading import read_all
from tests.fuzzing import cheap_and, fuzz
from tests.problems import SHARED_DATA, needs_shared_data

PARTS = [
    "a",
    "Wort",
    "l'",
    "'s",
    "9",
    "_",
    "é",
    "界",
    ".",
    "--",
    "🙂",
    "<|endoftext|>",
    "a\n",
    "Wort\n",
    "9\n\n",
]
SPACES = [" ", "  ", "\n", "\n ", "\t", "\r", "\u0301", "\u00a0", "\u2028", "\x1c", "\x85"]
TEXTS = st.lists(st.sampled_from([*PARTS, *SPACES]), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text_pieces, encoding, byte_tokenizer):
        monkeypatch.setattr(module, "PIECE", 5)


def check(tokenizer: Tokenizer, text: str) -> int:
    """Compare a text's tokens with those of all of it at once; returns the number of pieces."""
    pieces = list(tokenizer.pieces(text))
    assert "".join(pieces) == text
    texts = ["b", text, "c d", text, text]
    whole = [[*ids, tokenizer.end_of_text] for ids in tokenizer.encode(texts)]
    found = encode(tokenizer, {"train": texts, "validation": []}, "uint32")
    assert found["train"].tolist() == [*chain.from_iterable(whole)]
    assert len(found["validation"]) == 0
    return len(pieces)


@cheap_and(many=3000, cheap=200)
def test_pieces_have_the_tokens_of_the_whole(examples: int, tmp_path: Path) -> None:
    words = ["Wort 9\n a'l界\n\n. l's Wort\n.\n 99 \n", "a Wort\n  Wort\n\na\n--Wort 界\n"] * 9
    own = make_tokenizer("bpe:330", words)
    own.save(tmp_path)
    pieces = dict.fromkeys(("bytes", "own", "loaded"), 0)
    tokenizers = (make_tokenizer("bytes", ()), own, load_tokenizer(tmp_path))

    def compare(text: str) -> None:
        for name, tokenizer in zip(pieces, tokenizers, strict=True):
            pieces[name] = max(pieces[name], check(tokenizer, text))

    fuzz(examples, compare, text=TEXTS)
    assert min(pieces.values()) > 3


@pytest.mark.parametrize("end", ["\n", ".\n", "\r\n", " ", "\t"])
def test_a_text_is_divided_whatever_ends_its_words(end: str) -> None:
    """Prose ends its lines with punctuation, Windows with a carriage return before the newline."""
    assert check(make_tokenizer("bpe:330", ["so it goes"]), f"goes{end}" * 20) > 10


@needs_shared_data
@cheap_and(many=3000, cheap=100)
def test_tokenizers_of_others_are_divided_only_where_their_rules_are_known(examples: int) -> None:
    gpt2, bert, llama = (
        make_tokenizer(str(SHARED_DATA / "tokenizers" / name), ())
        for name in ("gpt2", "bert-base-uncased", "llama2")
    )

    def compare(text: str) -> None:
        check(gpt2, text)
        assert check(bert, text) == check(llama, text) == 1

    fuzz(examples, compare, text=TEXTS)
    assert check(gpt2, "Wort\n" * 20) > 3


def test_a_tokenizer_is_trained_on_pieces_as_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "so it goes\n  and so on\n\nand on\n" * 30
    pieces = make_tokenizer("bpe:300", [text])
    monkeypatch.setattr(text_pieces, "PIECE", 1 << 20)
    assert pieces.fingerprint() == make_tokenizer("bpe:300", [text]).fingerprint()


def test_a_chunk_ends_with_the_row_that_makes_it_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a" * 30, "b" * 5, "c" * 5, "d" * 200, "e"]
    for name, text in zip("abcde", texts, strict=True):
        (tmp_path / name).write_text(text)
    data = DataSettings(path=str(tmp_path), validation_fraction=0.2, cache=str(tmp_path / ".c"))
    whole = open_cache(data)
    assert whole.store.state.chunks == 1
    monkeypatch.setattr(feeds, "CHARACTERS_AT_ONCE", 20)
    (tmp_path / "d").write_text("d" * 200)  # Another time, so another cache.
    parts = open_cache(data)
    assert parts.folder != whole.folder
    assert parts.store.state.chunks == 3
    assert np.array_equal(parts.train, whole.train)
    assert np.array_equal(parts.validation, whole.validation)
    assert parts.corpus != whole.corpus


def test_rows_are_read_when_a_chunk_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And before the first chunk, as far as the first row that is held out."""
    read = list[int]()

    def rows() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield f"text {number}"

    monkeypatch.setattr(files, "load_object", lambda name: rows)
    data = DataSettings(factory="own.rows", validation_fraction=0.1)
    next(feeds.chunks_after(data, State(source="", dtype="uint16")))
    assert read == [*range(10), *range(256)]
    assert len(read_all(data).train) == 900
