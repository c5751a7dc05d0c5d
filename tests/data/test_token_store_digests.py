"""Digests of token stores: against hashes by hand; what was changed is found and named."""

import hashlib
import json
import struct
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.data import feeds
from adloco.data.data_settings import DataSettings
from adloco.data.token_cache import TokenCache, open_cache
from adloco.data.token_store import SAMPLED_CHUNKS, sample_chunks


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "ROWS_AT_ONCE", 2)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """39 texts of different lengths, the last of which is held out."""
    folder = tmp_path / "rows"
    folder.mkdir()
    texts = [chr(97 + number % 26) * (number + 9) for number in range(39)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def data(rows: Path, folder: Path) -> DataSettings:
    return DataSettings(path=str(rows), validation_fraction=0.34, cache=str(folder / "cache"))


@pytest.fixture
def cache(rows: Path, tmp_path: Path) -> TokenCache:
    return open_cache(data(rows, tmp_path))


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_every_chunk_has_the_digests_of_its_tokens(cache: TokenCache) -> None:
    records = list(struct.iter_unpack("<16sQ16sQ16s", (cache.folder / "chunks.bin").read_bytes()))
    assert len(records) == cache.store.state.chunks == 20
    for field, split in ((1, "train"), (3, "validation")):
        tokens = cache.store.tokens(split)  # type: ignore[arg-type]
        raw = (cache.folder / f"{split}.bin").read_bytes()
        start, size = 0, tokens.dtype.itemsize
        for record in records:
            end = record[field]
            expected = hashlib.sha256(raw[start * size : end * size]).digest()[:16]
            assert record[field + 1] == expected
            start = end
        assert start == len(tokens) > 0
    assert sum(cache.store.verify()) == len(cache.train) + len(cache.validation)


def test_a_sample_is_small_and_always_the_same() -> None:
    assert [sample_chunks(count) for count in range(4)] == [[], [0], [0, 1], [0, 1, 2]]
    for count in (10, 1000, 10**6):
        chosen = sample_chunks(count)
        assert chosen == sample_chunks(count)
        assert len({*chosen}) == SAMPLED_CHUNKS
        assert (chosen[0], chosen[-1]) == (0, count - 1)


def test_a_changed_chunk_is_found(cache: TokenCache, rows: Path, tmp_path: Path) -> None:
    """One of the sample when the store is opened, any of them by `verify`."""
    train = cache.folder / "train.bin"
    # All chunks but the last have a text to train on.
    other = min({*range(1, 19)} - {*sample_chunks(20)})
    ends = [
        record[1]
        for record in struct.iter_unpack("<16sQ16sQ16s", (cache.folder / "chunks.bin").read_bytes())
    ]
    at = ends[other - 1] * cache.train.dtype.itemsize
    flip(train, at)
    again = open_cache(data(rows, tmp_path))
    with pytest.raises(ValueError, match="train.bin in the token cache is not what was written"):
        list(again.store.verify())
    flip(train, at)
    for file, place, named in (
        (train, 9, "train.bin"),
        (cache.folder / "validation.bin", -1, "validation.bin"),
        (cache.folder / "chunks.bin", 25, "train.bin"),
    ):
        flip(file, place)
        with pytest.raises(ValueError, match=f"{named} in the token cache is not what"):
            open_cache(data(rows, tmp_path))
        flip(file, place)
    assert open_cache(data(rows, tmp_path)).train.tolist() == cache.train.tolist()


def test_a_changed_tokenizer_is_found(corpus: Path, tmp_path: Path) -> None:
    settings = DataSettings(path=str(corpus), cache=str(tmp_path), tokenizer="bpe:260")
    folder = open_cache(settings).folder
    (file,) = folder.rglob("tokenizer.json")
    file.write_text(file.read_text().replace('"added_tokens"', ' "added_tokens"'))
    with pytest.raises(ValueError, match="tokenizer.json in the token cache is not what"):
        open_cache(settings)


def test_prepare_verifies(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prepare", "single", "--processes", "1", "--verify"]
    words += small[small.index("--data.path") :][:4]
    assert main(words) == 0
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    meta = json.loads((folder / "meta.json").read_text())
    total = meta["train"] + meta["validation"]
    assert f"all {total:,} tokens match their digests" in capsys.readouterr().out
    flip(folder / "train.bin", -1)
    assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"adloco: {folder / 'train.bin'} in the token cache is not what was written there; remove "
        f"{folder}, and it is made again from the text"
    )
