"""Checksums of token stores: against hashes by hand; what was changed is found and named."""

import hashlib
import json
import struct
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.data import token_checksums
from adloco.data.data_settings import DataSettings
from adloco.data.token_cache import TokenCache, open_cache
from adloco.data.token_checksums import SAMPLED_BLOCKS, sample_blocks

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_checksums, "BLOCK_TOKENS", BLOCK)


@pytest.fixture
def cache(corpus: Path, tmp_path: Path) -> TokenCache:
    return open_cache(data(corpus, tmp_path))


def data(corpus: Path, folder: Path) -> DataSettings:
    return DataSettings(path=str(corpus), cache=str(folder / "cache"))


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_every_block_has_the_digest_of_its_bytes(cache: TokenCache) -> None:
    for split, tokens in (("train", cache.train), ("validation", cache.validation)):
        raw = (cache.folder / f"{split}.bin").read_bytes()
        start, size = 0, tokens.dtype.itemsize
        records = list(struct.iter_unpack("<Q16s", (cache.folder / f"{split}.sums").read_bytes()))
        assert len(records) > 2
        for end, digest in records:
            assert 0 < end - start <= BLOCK
            assert digest == hashlib.sha256(raw[start * size : end * size]).digest()[:16]
            start = end
        assert start == len(tokens)
    assert sum(cache.store.verify()) == len(cache.train) + len(cache.validation)


def test_a_sample_is_small_and_always_the_same() -> None:
    assert [sample_blocks(count) for count in range(4)] == [[], [0], [0, 1], [0, 1, 2]]
    for count in (10, 1000, 10**6):
        chosen = sample_blocks(count)
        assert chosen == sample_blocks(count)
        assert len({*chosen}) == SAMPLED_BLOCKS
        assert (chosen[0], chosen[-1]) == (0, count - 1)


def test_a_changed_block_is_found(cache: TokenCache, corpus: Path, tmp_path: Path) -> None:
    """One of the sample when the store is opened, any of them by `verify`."""
    train = cache.folder / "train.bin"
    blocks = cache.store.state.blocks
    assert blocks is not None
    count = blocks["train"]
    other = min({*range(count)} - {*sample_blocks(count)})
    at = other * BLOCK * cache.train.dtype.itemsize
    flip(train, at)
    again = open_cache(data(corpus, tmp_path))
    with pytest.raises(ValueError, match="train.bin in the token cache is not what was written"):
        list(again.store.verify())
    flip(train, at)
    for file in (train, cache.folder / "validation.bin", cache.folder / "validation.sums"):
        flip(file, 9)
        with pytest.raises(ValueError, match=f"{file.stem}.bin in the token cache is not what"):
            open_cache(data(corpus, tmp_path))
        flip(file, 9)
    assert open_cache(data(corpus, tmp_path)).train.tolist() == cache.train.tolist()


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
    assert f"all {total:,} tokens match their checksums" in capsys.readouterr().out
    flip(folder / "train.bin", -1)
    assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"adloco: {folder / 'train.bin'} in the token cache is not what was written there; remove "
        f"{folder}, and it is made again from the text"
    )
