"""Any file of a tokenizer is used, or refused in one sentence: no other exception, no hang."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from adloco.data.tokenizers import make_tokenizer
from tests.fuzzing import BITS, cheap_and, flip, fuzz

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**24, 2**31, 2**32 - 1, 2**32, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
)
FILES = ("tokenizer.json", "tokenizer_config.json")


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in JSON content, but of at most three of a list or object."""
    items = (
        list(content.items() if isinstance(content, dict) else enumerate(content))
        if (isinstance(content, (dict, list)))
        else []
    )
    chosen = items if len(items) < 40 else [*items[:2], items[-1]]
    return [path] * bool(path) + [
        place for key, item in chosen for place in places(item, (*path, key))
    ]


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The content with another value at this path."""
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


def used_or_refused(folder: Path) -> None:
    try:
        tokenizer = make_tokenizer(str(folder), ())
        ids = tokenizer.encode(["some text", "é"])
        assert all(0 <= number < tokenizer.vocab_size for row in ids for number in row)
        assert 0 <= tokenizer.end_of_text < tokenizer.vocab_size
        tokenizer.decode([number for row in ids for number in row])
        tokenizer.encode_whole(["some text"], 8)
        tokenizer.fingerprint()
        assert len(tokenizer.id_bytes()) == tokenizer.vocab_size
    except ValueError as error:
        assert 0 < len(str(error)) < 3000


def saved(folder: Path) -> dict[str, bytes]:
    """The files of a small tokenizer, in this folder."""
    texts = ["some text of a few words", "more text"] * 9
    make_tokenizer("bpe:280", texts).to_transformers(whole=False).save_pretrained(folder)
    return {name: (folder / name).read_bytes() for name in FILES}


@cheap_and(many=400, cheap=25)
def test_values_in_the_files(examples: int, tmp_path: Path) -> None:
    whole = saved(tmp_path)
    contents = {name: json.loads(text) for name, text in whole.items()}
    at = [(name, path) for name, content in contents.items() for path in places(content)]

    def check(place: tuple[str, tuple[Any, ...]], value: Any) -> None:
        name, path = place
        for each, text in whole.items():
            (tmp_path / each).write_bytes(text)
        (tmp_path / name).write_text(json.dumps(replaced(contents[name], path, value)))
        used_or_refused(tmp_path)

    fuzz(examples, check, place=st.sampled_from(at), value=VALUES)


@cheap_and(many=400, cheap=10)
def test_flipped_bits(examples: int, tmp_path: Path) -> None:
    whole = saved(tmp_path)

    def check(name: str, bits: list[int]) -> None:
        for each, text in whole.items():
            (tmp_path / each).write_bytes(flip(text, bits) if each == name else text)
        used_or_refused(tmp_path)

    fuzz(examples, check, name=st.sampled_from(FILES), bits=BITS)
