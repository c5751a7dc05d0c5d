"""The bytes that tokens stand for are those of the texts they were made from, by hand: with bytes,
byte pairs, and the kind of vocabulary that writes spaces as tokens and unknown characters in bytes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from numpy.typing import NDArray

from adloco.data.data_settings import DataSettings
from adloco.data.encoding import encode
from adloco.data.sources import TokenSource
from adloco.data.token_bytes import TokenBytes, predicted_bytes
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.data.transformers_tokenizer import PROBE, TransformersTokenizer
from adloco.models.sources.llama import LlamaShape
from adloco.tasks.language_model import open_language_model
from adloco.tasks.task import EvaluationSettings, TaskData
from tests.problems import SHARED_DATA, build_llama, needs_shared_data

TINY = LlamaShape(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)

TEXTS = [
    "def main():\n    return 'h\u00e9llo \u4e16\u754c \U0001f642'\n",
    "",
    "import os\n\n\tx  = 1",
]


def space_pieces(*, byte_fallback: bool) -> TransformersTokenizer:
    """A vocabulary like those of SentencePiece: each text gets a space in front, and a character
    that it lacks is either its bytes or unknown. It knows the characters of `PROBE` alone.
    """
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "<unk>",
        "</s>",
        *single_bytes,
        "\u2581",
        *sorted(set(PROBE) - {" "}),
        "he",
        "\u2581he",
    ]
    merges = [("h", "e"), ("\u2581", "he")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=byte_fallback)
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TransformersTokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="</s>", unk_token="<unk>"
        ),
        "spaces",
    )


def packed(tokenizer: Tokenizer, texts: list[str]) -> NDArray[Any]:
    """The documents as a cache packs them."""
    return encode(tokenizer, {"train": texts}, "uint32")["train"]


def counted(tokenizer: Tokenizer, texts: list[str], context_tokens: int) -> NDArray[np.float64]:
    """The bytes in each window. The end of a text is put first, so that all else is predicted."""
    tokens = np.array([tokenizer.end_of_text, *packed(tokenizer, texts)])
    source = TokenSource(tokens, context_tokens=context_tokens or len(tokens) - 1)
    return predicted_bytes(tokenizer, source, np.arange(source.num_windows))


MADE = {
    "bytes": lambda: make_tokenizer("bytes", ()),
    "byte pairs": lambda: make_tokenizer("bpe:300", TEXTS),
    "space pieces": lambda: space_pieces(byte_fallback=True),
}


@pytest.mark.parametrize("name", MADE)
def test_documents_have_the_bytes_of_their_text(name: str) -> None:
    """All in one window, and a window for each token, which cuts the characters of several."""
    tokenizer = MADE[name]()
    for texts in (TEXTS, ["a"], ["he he", PROBE, "\u00fc\U0001f642"], [""], ["a<|endoftext|>"]):
        decoded = [tokenizer.decode(tokenizer.encode([text])[0]) for text in texts]
        assert decoded == texts
        expected = sum(len(text.encode()) for text in decoded)
        assert counted(tokenizer, texts, 0).tolist() == [expected]
        each = counted(tokenizer, texts, 1)
        assert len(each) == len(packed(tokenizer, texts)) and each.sum() == expected


@pytest.mark.parametrize("name", MADE)
def test_no_byte_is_lost(name: str) -> None:
    tokenizer = MADE[name]()
    for texts in (TEXTS, ["a", " b", ""], []):
        text_bytes = sum(len(text.encode()) for text in texts)
        tokens = packed(tokenizer, texts)
        token_bytes = TokenBytes.of(tokenizer)
        assert token_bytes.lost(tokens, len(texts), text_bytes) == 0
        assert token_bytes.lost(tokens, len(texts), text_bytes + 9) >= 9


def test_the_characters_of_an_end_of_text_are_not_lost() -> None:
    """A tokenizer of transformers reads its special tokens in a text."""
    fast = make_tokenizer("bpe:300", TEXTS).to_transformers(whole=False)
    fast.split_special_tokens = False
    tokenizer = TransformersTokenizer(fast, "special")
    texts = ["one<|endoftext|>two<|endoftext|>", "three"]
    tokens = packed(tokenizer, texts)
    assert list(tokens).count(tokenizer.end_of_text) == 4
    assert TokenBytes.of(tokenizer).lost(tokens, 2, sum(map(len, texts))) == 0


def test_characters_that_a_tokenizer_drops_are_noticed(tmp_path: Path) -> None:
    """A byte-level vocabulary that lacks the bytes of what it was not trained on drops them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    made.train_from_iterator([PROBE], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    fast.save_pretrained(tmp_path / "tokenizer")
    known = []
    for text in ("The quick brown fox. ", "The quick \u4e16\u754c fox. "):
        (tmp_path / "text.txt").write_text(text * 400)
        data = DataSettings(
            path=str(tmp_path / "text.txt"),
            tokenizer=str(tmp_path / "tokenizer"),
            cache=str(tmp_path / "cache"),
            context_tokens=16,
        )
        task = open_language_model(TaskData(data, EvaluationSettings(windows=4)))
        _, num_bytes, _ = task.measure(
            build_llama(TINY, task.tokenizer.vocab_size, 0), torch.device("cpu"), at_once=4
        )
        known.append((num_bytes > 0, "drops or changes characters" in task.skipped()))
    assert known == [(True, False), (False, True)]


def test_the_bytes_of_each_token_by_hand() -> None:
    """The space in front of a text is none of it, and the end of a text has no byte. The smile is
    four tokens of a byte each. The window begins behind the first token, which is not predicted.
    """
    tokenizer = space_pieces(byte_fallback=True)
    assert counted(tokenizer, ["he \U0001f642", "", "a"], 1).tolist() == [
        *(2, 1, 1, 1, 1, 1, 0),
        0,  # The text without characters: its end alone.
        *(0, 1, 0),
    ]
    pairs = make_tokenizer("bpe:300", ["import os\n" * 9])
    tokens = packed(pairs, ["import os\n"])
    source = TokenSource(tokens, context_tokens=len(tokens) - 1)
    rest = pairs.decode(tokens[1:-1].tolist())
    assert len(rest) < len("import os\n")
    assert predicted_bytes(pairs, source, np.array([0])).tolist() == [len(rest.encode())]


def test_characters_that_the_vocabulary_lacks_have_no_known_bytes() -> None:
    """Only windows that predict them have no number."""
    tokenizer = space_pieces(byte_fallback=False)
    each = counted(tokenizer, ["he", "\u4e16", "a"], 1)
    unknown = packed(tokenizer, ["he", "\u4e16", "a"]) == tokenizer.unknown
    assert unknown.sum() == 1 and np.isnan(each).tolist() == unknown.tolist()


def test_a_tokenizer_that_loses_spaces_has_no_bytes() -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"</s>": 0, "a": 1, "Hello": 2, "[UNK]": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for decoder in (None, tokenizers.decoders.WordPiece()):
        if decoder:
            words.decoder = decoder
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="</s>", unk_token="[UNK]"
        )
        assert np.isnan(counted(TransformersTokenizer(fast, "words"), ["Hello a"], 0)).all()


@needs_shared_data
@pytest.mark.parametrize("name", ["gpt2", "llama2", "bert-base-uncased"])
def test_published_vocabularies(name: str) -> None:
    tokenizer = make_tokenizer(str(SHARED_DATA / "tokenizers" / name), ())
    (found,) = counted(tokenizer, TEXTS, 0)
    if name == "bert-base-uncased":
        assert np.isnan(found)
    else:
        assert found == sum(len(text.encode()) for text in TEXTS)
