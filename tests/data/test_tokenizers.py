"""Tokenizers give the ids that token caches hold: those of the bytes, and those of the
`tokenizers` library itself.
"""

import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from adloco.data.data_settings import DataSettings
from adloco.data.token_cache import open_cache
from adloco.data.tokenizers import load_tokenizer, make_tokenizer
from adloco.data.transformers_tokenizer import TransformersTokenizer
from tests.problems import SHARED_DATA, needs_shared_data

TEXTS = ["def main():\n    return 'h\u00e9llo \u4e16\u754c'\n", "import os\n" * 20, "x = 1\n" * 50]


def byte_pairs(size: int) -> Any:
    """A byte-level BPE, made with the `tokenizers` library alone."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def random_texts() -> list[str]:
    """Texts with all bytes but 0, all planes of Unicode, spaces, and the end-of-text token."""
    rng = random.Random(0)
    every_byte = bytes(range(1, 256)).decode("latin-1")

    def character() -> str:
        if rng.random() < 0.5:
            return chr(rng.randrange(1, 0x250))
        point = rng.randrange(1, 0x110000)
        return " " if 0xD800 <= point < 0xE000 else chr(point)

    drawn = ["".join(character() for _ in range(rng.randrange(200))) for _ in range(200)]
    return [*TEXTS, "", " ", "\r\n\t ", every_byte, "a <|endoftext|> b<|endoftext|>", *drawn]


def test_bytes_are_those_of_utf8() -> None:
    tokenizer = make_tokenizer("bytes", ())
    texts = [*random_texts(), "a\0b"]
    assert tokenizer.encode(texts) == [list(text.encode()) for text in texts]
    assert tokenizer.encode([]) == []
    assert tokenizer.encode_whole(["abc", ""], 3) == [[0, 97, 98], [0]]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (256, 0)
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode(["a\ud800"])


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([97, 0xFF, 98], "a\ufffdb"),
        # Cut inside a character, as a model may do.
        ([0xE4, 0xB8], "\ufffd"),
        ([0xC3, 0xA9, 0xE4], "\u00e9\ufffd"),
    ],
)
def test_bytes_that_are_no_text_are_decoded_to_a_mark(ids: list[int], text: str) -> None:
    assert make_tokenizer("bytes", ()).decode(ids) == text


def test_trained_byte_pairs_are_those_of_the_library(tmp_path: Path) -> None:
    theirs, ours = byte_pairs(300), make_tokenizer("bpe:300", TEXTS)
    theirs.encode_special_tokens = True
    texts = [*random_texts(), "a\0b"]
    expected = [theirs.encode(text).ids for text in texts]
    ours.save(tmp_path)
    for tokenizer in (ours, load_tokenizer(tmp_path)):
        assert tokenizer.encode(texts) == expected
        assert tokenizer.encode_whole(texts, 7) == [[0, *ids][:7] for ids in expected]
        assert [tokenizer.decode(ids) for ids in expected] == texts
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (theirs.get_vocab_size(), 0)


def test_ids_may_have_gaps() -> None:
    """Three tokens whose largest id is 9: an embedding needs ten rows."""
    words = tokenizers.models.WordLevel({"</s>": 0, "a": 4, "b": 9}, unk_token="</s>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="</s>"
    )
    assert TransformersTokenizer(tokenizer, "gaps").vocab_size == 10


@pytest.mark.parametrize("size", ["99999999999", "10000000", "9" * 5000, "\u0663" * 3, "-300", ""])
def test_a_size_of_byte_pairs_that_cannot_be_meant(size: str) -> None:
    with pytest.raises(ValueError, match="bpe needs a size above 256 and below 10 million"):
        make_tokenizer(f"bpe:{size}", ["a"])


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
@pytest.mark.parametrize("whole", [False, True])
def test_transformers_encodes_alike(name: str, whole: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, texts = make_tokenizer(name, TEXTS), random_texts()
    tokenizer.to_transformers(whole=whole).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.encode_whole(texts, 10**6) if whole else tokenizer.encode(texts)
    assert theirs(texts)["input_ids"] == expected
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.end_of_text, tokenizer.vocab_size)
    assert theirs.decode(tokenizer.encode([TEXTS[0]])[0]) == TEXTS[0]


def test_a_class_that_adds_special_tokens_adds_none_once_it_is_loaded(tmp_path: Path) -> None:
    """A BertTokenizer makes its post-processor when it is loaded, whatever was saved."""
    from transformers import AutoTokenizer, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "what", "<turn>"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    own = BertTokenizer.from_pretrained(tmp_path, extra_special_tokens=["<turn>"])
    own.save_pretrained(tmp_path)
    tokenizer = make_tokenizer(str(tmp_path), ())
    assert tokenizer.encode_whole(["so what"], 9) == [[2, 5, 6, 3]]
    for whole, expected in ((True, [2, 5, 6, 3]), (False, [5, 6])):
        tokenizer.to_transformers(whole=whole).save_pretrained(tmp_path / str(whole))
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(whole))
        assert loaded("so what")["input_ids"] == expected
        assert (loaded.pad_token_id, loaded.sep_token_id) == (0, 3)
        assert loaded.extra_special_tokens == ["<turn>"]


@pytest.mark.parametrize("split", [True, False], ids=["as text", "as a token"])
def test_texts_are_encoded_as_transformers_does(split: bool) -> None:
    fast = make_tokenizer("bpe:300", TEXTS).to_transformers(whole=True)
    fast.split_special_tokens = split
    own = TransformersTokenizer(fast, "own")
    texts = [*TEXTS, "", f"a {fast.eos_token} b", "Ünïcödé " * 40]
    expected = fast(texts, add_special_tokens=False, verbose=False)["input_ids"]
    own.encode_whole(texts, 3)  # It leaves a limit of 3 tokens in the tokenizer.
    assert own.encode(texts) == expected


def changed(name: str) -> Any:
    """A tokenizer of transformers with the same vocabulary, one thing of which differs."""
    fast = make_tokenizer("bpe:300", TEXTS).to_transformers(whole=True)
    if name == "end of text":
        fast.eos_token = "a"
    elif name == "special tokens":
        fast.split_special_tokens = not fast.split_special_tokens
    elif name == "chat":
        fast.chat_template = "{{ messages }}"
    elif name == "lower case":
        fast.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    return fast


@pytest.mark.parametrize("name", ["end of text", "special tokens", "chat", "lower case"])
def test_tokenizers_with_one_vocabulary_are_not_taken_for_each_other(
    name: str, tmp_path: Path
) -> None:
    """Whichever was first would be the one of both, in training and in exports."""
    text = tmp_path / "text.txt"
    text.write_text("A text <|endoftext|> and another one, a little longer. " * 20)
    ends = []
    for kind in ("as it is", name):
        changed(kind).save_pretrained(tmp_path / kind)
        data = DataSettings(
            path=str(text), tokenizer=str(tmp_path / kind), cache=str(tmp_path / "cache")
        )
        again = [open_cache(data) for _ in range(2)]
        assert again[0].folder == again[1].folder
        assert again[0].tokenizer.encode(TEXTS) == make_tokenizer(data.tokenizer, ()).encode(TEXTS)
        exported = again[0].tokenizer.to_transformers(whole=True)
        assert exported.chat_template == changed(kind).chat_template
        ends.append((again[0].folder, again[0].tokenizer.end_of_text))
    # A chat template changes no ids, so those are shared.
    assert (ends[0][0] != ends[1][0]) == (name != "chat")
    assert (ends[0][1] != ends[1][1]) == (name == "end of text")


def test_the_library_does_not_import_transformers() -> None:
    code = (
        "import sys, adloco, adloco.data.tokenizers as made; made.make_tokenizer('bytes', ());"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_tokenizers_round_trip_and_reload(tmp_path: Path, name: str) -> None:
    tokenizer = make_tokenizer(name, TEXTS)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    texts = [*TEXTS, "a <|endoftext|> b"]  # The characters of the end of text are text.
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert again.encode(texts) == encoded
    assert (again.vocab_size, again.end_of_text, again.fingerprint()) == (
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        tokenizer.fingerprint(),
    )
    assert max(map(max, encoded)) < tokenizer.vocab_size
    assert all(tokenizer.end_of_text not in ids for ids in encoded)
    if name != "bytes":
        assert tokenizer.vocab_size <= 300
        assert sum(map(len, encoded)) < sum(len(text.encode()) for text in TEXTS)


PLAIN = (
    "The quick brown fox, at 13:45, jumps over 2 lazy dogs; it's Zoë's naïve café — said she: "
    '"5 € or 7 £?" (no reply!)\n\nNew paragraph.'
)
CODE = "\tdef f(x):\n    return {'a': [x ** 2, 世界, 🙂]}  # done\n"


@needs_shared_data
@pytest.mark.parametrize(
    ("name", "size", "ending"),
    [
        ("gpt2", 50257, "<|endoftext|>"),
        ("llama2", 32000, "</s>"),
        ("bert-base-uncased", 30522, "[SEP]"),
    ],
)
def test_published_vocabularies_round_trip(
    name: str, size: int, ending: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(str(SHARED_DATA / "tokenizers" / name), ())
    assert tokenizer.vocab_size == size
    assert tokenizer.decode([tokenizer.end_of_text]) == ending
    plain, code = tokenizer.encode([PLAIN, CODE])
    assert tokenizer.end_of_text not in plain + code
    if name == "bert-base-uncased":
        # It knows words, neither their case nor accents nor what stands between them.
        words = unicodedata.normalize("NFD", PLAIN.lower())
        bare = "".join(
            character
            for character in words
            if not unicodedata.combining(character) and not character.isspace()
        )
        assert tokenizer.decode(plain).replace(" ", "") == bare
        assert tokenizer.encode([tokenizer.decode(plain)]) == [plain]
        assert (
            tokenizer.decode(tokenizer.encode(["the quick brown fox jumps."])[0])
            == "the quick brown fox jumps."
        )
    else:
        assert tokenizer.decode(plain) == PLAIN
        assert tokenizer.decode(code) == CODE
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode([PLAIN, CODE]) == [plain, code]


@needs_shared_data
@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_a_sentencepiece_vocabulary_without_what_reads_it(module: str) -> None:
    folder = str(SHARED_DATA / "tokenizers" / "llama2")
    code = (
        f"import sys; sys.modules[{module!r}] = None; import adloco.data.tokenizers as tokenizers; "
        f"tokenizers.make_tokenizer({folder!r}, ())"
    )
    error = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stderr
    last = error.splitlines()[-1]
    assert last.startswith(f"ValueError: data.tokenizer {folder!r} could not be loaded (")
    assert "for a tokenizer.model also pip install 'adloco[sentencepiece]'" in last


@pytest.mark.parametrize("name", ["bpe:", "bpe:12", "bpe:many", "/no/such/folder"])
def test_unknown_tokenizers(name: str) -> None:
    with pytest.raises(ValueError, match="data.tokenizer"):
        make_tokenizer(name, TEXTS)
