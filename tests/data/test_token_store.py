"""Caches that grow: the same bytes however often they were cut off, and the same windows whoever
fetched them.
"""

import errno
import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from adloco.data import token_cache, token_store
from adloco.data.byte_tokenizer import ByteTokenizer
from adloco.data.data_settings import DataSettings
from adloco.data.encoding import Chunk
from adloco.data.feeds import ROWS_AT_ONCE, chunks_after
from adloco.data.sources import StreamSource
from adloco.data.token_cache import TokenCache, begin_cache, open_cache
from adloco.data.token_store import State, TokenStore

pytest.importorskip("datasets", reason="datasets is not installed")
ROWS = 5 * ROWS_AT_ONCE + 17
VALIDATION = 40


@pytest.fixture(scope="module")
def words() -> list[str]:
    rng = random.Random(0)
    return [
        " ".join(rng.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(rng.randint(1, 12)))
        for _ in range(ROWS)
    ]


@pytest.fixture(scope="module")
def folder(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three files."""
    folder = tmp_path_factory.mktemp("words")
    for part in range(3):
        rows = words[part * ROWS // 3 : (part + 1) * ROWS // 3]
        (folder / f"train-{part}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in rows)
        )
    return folder


def settings(folder: Path, cache: Path, **changes: Any) -> DataSettings:
    return DataSettings(
        dataset=str(folder),
        validation_samples=VALIDATION,
        cache=str(cache),
        context_tokens=16,
        **changes,
    )


def files(cache: TokenCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.iterdir()}


def packed(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), 0)]


def test_tokens_are_those_of_the_rows(words: list[str], folder: Path, tmp_path: Path) -> None:
    cache = open_cache(settings(folder, tmp_path))
    assert cache.validation.tolist() == packed(words[:VALIDATION])
    assert cache.train.tolist() == packed(words[VALIDATION:])
    meta = json.loads((cache.folder / "meta.json").read_text())
    assert (meta["rows"], meta["complete"], meta["skipped"]) == (ROWS, True, {})
    every = open_cache(
        DataSettings(dataset=str(folder), validation_fraction=0.1, cache=str(tmp_path))
    )
    assert every.validation.tolist() == packed(words[9::10])
    texts, state = words[9::10], every.store.state
    assert state.validation_documents == len(texts)
    assert state.validation_bytes == sum(map(len, texts))


@pytest.mark.parametrize("chunks", [0, 1, 3, 5])
def test_a_preparation_that_is_cut_off_resumes_to_the_same_bytes(
    chunks: int, folder: Path, tmp_path: Path
) -> None:
    whole = files(open_cache(settings(folder, tmp_path / "whole")))
    cut = begin_cache(settings(folder, tmp_path / "cut"))
    for state in cut.store.grow(lambda state: state.chunks >= chunks):
        assert state.chunks <= chunks
    # Killed while the next chunk is being written.
    for name in ("train.bin", "validation.bin", "chunks.bin"):
        with (cut.folder / name).open("ab") as file:
            file.write(b"half a chunk")
    (cut.folder / ".meta.json").write_text('{"for')
    again = open_cache(settings(folder, tmp_path / "cut"))
    assert again.folder == cut.folder
    assert files(again) == whole


def test_a_full_disk_is_named_and_a_cache_goes_on_when_there_is_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = settings(folder, tmp_path / "full")
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_write_at", full)
        with pytest.raises(ValueError, match=r"full/.* cannot be written .No space.*; make room"):
            open_cache(told)
    assert files(open_cache(told)) == files(open_cache(settings(folder, tmp_path / "whole")))


def test_a_thread_that_comes_after_an_error_loses_no_chunk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a stream share the store: one meets the error, and the next one goes on."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shared = begin_cache(settings(folder, tmp_path / "shared", streaming=True))
    begun = len(shared.at_least(1))
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_write_at", full)
        with pytest.raises(ValueError, match="make room"):
            shared.at_least(begun + 1)
    shared.at_least(10**9)
    whole = open_cache(settings(folder, tmp_path / "whole"))
    assert files(shared) == files(whole)


def test_every_thread_is_told_what_is_wrong_with_the_source(tmp_path: Path) -> None:
    rows = [{"text": "alpha"} for _ in range(2 * ROWS_AT_ONCE)] + [{"text": 5}]
    file = tmp_path / "rows" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = begin_cache(settings(file.parent, tmp_path / "caches", streaming=True))
    shared.at_least(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="is not text but int"):
            shared.at_least(10**9)


def test_a_damaged_cache_is_made_again(folder: Path, tmp_path: Path) -> None:
    cache = open_cache(settings(folder, tmp_path))
    whole = files(cache)
    for cut in ("train.bin", "chunks.bin"):
        (cache.folder / cut).write_bytes(whole[cut][:-3])
        assert files(open_cache(settings(folder, tmp_path))) == whole
    meta = json.loads(whole["meta.json"])
    for key in meta:
        lacking = {name: value for name, value in meta.items() if name != key}
        (cache.folder / "meta.json").write_text(json.dumps(lacking))
        assert files(open_cache(settings(folder, tmp_path))) == whole, key


def test_a_cache_whose_source_failed_resumes_with_good_rows(tmp_path: Path) -> None:
    """What was read before a bad row stays."""
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / "train.jsonl"
    given = [{"text": "alpha"} for _ in range(ROWS_AT_ONCE)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*given, {"text": 5}]))
    data = settings(tmp_path / "rows", tmp_path / "caches")
    shared = begin_cache(data)
    with pytest.raises(ValueError, match="is not text but int"):
        open_cache(data)
    file.write_text(file.read_text().replace("5", '"beta"'))
    for _ in shared.store.grow(lambda state: state.complete):
        pass
    texts = bytes([*shared.train.tolist(), *shared.validation.tolist()]).decode().split("\0")
    assert sorted(texts) == sorted(["", *["alpha"] * ROWS_AT_ONCE, "beta"])


def test_a_stream_fetches_what_it_serves_and_serves_what_stands_in_the_text(
    words: list[str], folder: Path, tmp_path: Path
) -> None:
    text = np.array(packed(words[VALIDATION:]))
    windows = (len(text) - 1) // 16
    cache = open_cache(settings(folder, tmp_path, streaming=True))
    assert cache.store.state.chunks == 1
    assert cache.validation.tolist() == packed(words[:VALIDATION])
    source = cache.train_source(num_streams=3, seed=0)
    for stream in (2, 0, 1):
        own = list(range(stream, windows, 3))
        # Into the third epoch.
        read = torch.cat(
            [source.read(stream, position, 5) for position in range(0, 2 * len(own) + 5, 5)]
        )
        for position in range(0, 2 * len(own) + 5):
            window = own[position % len(own)]
            assert read[position].tolist() == text[16 * window : 16 * window + 17].tolist()
        if stream == 2:
            assert cache.store.state.complete
    assert files(cache) == files(open_cache(settings(folder, tmp_path / "at once")))


def test_a_stream_fetches_no_more_than_it_serves(folder: Path, tmp_path: Path) -> None:
    cache = open_cache(settings(folder, tmp_path, streaming=True))
    source = cache.train_source(num_streams=1, seed=0)
    windows = cache.store.state.train // 16 - 1
    source.read(0, 0, windows)
    assert cache.store.state.chunks == 1
    source.read(0, windows, 2)
    assert cache.store.state.chunks == 2


def test_several_that_share_a_folder_append_in_turn(folder: Path, tmp_path: Path) -> None:
    alone = open_cache(settings(folder, tmp_path / "alone", streaming=True)).train_source(
        num_streams=2, seed=0
    )
    shared = [open_cache(settings(folder, tmp_path / "shared", streaming=True)) for _ in range(2)]
    sources = [cache.train_source(num_streams=2, seed=0) for cache in shared]
    for position in range(0, 1500, 250):
        for stream in range(2):
            assert (
                sources[(position // 250 + stream) % 2]
                .read(stream, position, 250)
                .equal(alone.read(stream, position, 250))
            )
    for cache in shared:
        cache.at_least(10**9)
    assert files(shared[0]) == files(open_cache(settings(folder, tmp_path / "whole")))


def test_who_appends_in_turn_reads_a_file_once(
    words: list[str], folder: Path, tmp_path: Path
) -> None:
    """It was read from its beginning for each chunk: of a dataset on the hub, downloaded."""
    one = tmp_path / "words.jsonl"
    one.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    begun: list[int] = []

    def sharing(name: str, data: DataSettings) -> list[TokenStore]:
        def feed(state: State) -> Iterator[Chunk]:
            begun.append(state.chunks)
            yield from chunks_after(data, state)

        return [TokenStore(tmp_path / name, feed, "words", ByteTokenizer) for _ in range(3)]

    def append(store: TokenStore, chunks: int) -> None:
        for _ in store.grow(lambda state: state.chunks >= chunks):
            pass

    data = DataSettings(path=str(one), validation_samples=VALIDATION)
    stores = sharing("in turn", data)
    for chunks, turn in enumerate((0, 1, 2, 1, 0, 2), start=1):
        append(stores[turn], chunks)
    assert begun == [0, 1, 2] and stores[2].state.complete
    alone = TokenStore(tmp_path / "alone", partial(chunks_after, data), "words", ByteTokenizer)
    append(alone, 6)
    for name in ("train.bin", "validation.bin", "chunks.bin", "meta.json"):
        assert (tmp_path / "in turn" / name).read_bytes() == (alone.folder / name).read_bytes()
    # Who has fewer rows to read from the beginning of a file than from its own place begins there.
    begun.clear()
    stores = sharing("far behind", settings(folder, tmp_path))
    append(stores[0], 1)
    append(stores[1], 4)
    append(stores[0], 5)
    assert begun == [0, 1, 4]


def test_a_cache_that_another_process_begins_or_fills_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(folder, tmp_path)
    one, other = begin_cache(data), begin_cache(data)
    next(one.store.grow(lambda state: state.complete))
    monkeypatch.setattr(token_store, "WAIT_SECONDS", 0.01)
    with FileLock(f"{one.folder}.lock"):  # As a third one has it.
        grown = other.store.grow(lambda state: state.complete)
        assert [next(grown).chunks for _ in range(2)] == [1, 1]
    looks = iter([False])  # It has begun it after the first look.
    monkeypatch.setattr(token_store, "intact", lambda folder: next(looks, True))
    assert begin_cache(data).store.state.chunks == 1


def test_a_stream_shorter_than_its_streams_ends(tmp_path: Path) -> None:
    source = StreamSource(lambda count: np.arange(9), context_tokens=4, num_streams=1)
    assert source.read(0, 0, 3).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]


def test_a_stream_asks_for_the_last_token_of_what_it_serves() -> None:
    """With one token less it would take the text for ended, and begin it again."""
    source = StreamSource(lambda count: np.arange(count), context_tokens=4, num_streams=2)
    assert source.read(1, 0, 2).tolist() == [[4, 5, 6, 7, 8], [12, 13, 14, 15, 16]]


def test_a_cache_knows_its_text(words: list[str], folder: Path, tmp_path: Path) -> None:
    stream = open_cache(settings(folder, tmp_path / "a", streaming=True))
    stream.at_least(stream.store.state.train + 1)
    early = stream.corpus
    stream.at_least(10**9)
    assert stream.corpus != early
    # Elsewhere, with nothing fetched yet: it fetches as much as it takes to compare.
    moved = shutil.copytree(folder, tmp_path / "moved")
    elsewhere = open_cache(settings(moved, tmp_path / "b", streaming=True))
    assert elsewhere.matches_fingerprint(early)
    assert elsewhere.store.state.chunks == 2
    assert elsewhere.matches_fingerprint(stream.corpus)
    for other in ("7:" + "0" * 32, "0:" + "0" * 32, "of another task"):
        assert not elsewhere.matches_fingerprint(other)
    (moved / "train-1.jsonl").write_text(
        (moved / "train-1.jsonl").read_text().replace("beta", "zeta", 1)
    )
    changed = open_cache(settings(moved, tmp_path / "b", streaming=True))
    assert changed.folder != elsewhere.folder
    assert not changed.matches_fingerprint(early)


def test_a_prepared_dataset_of_the_hub_needs_no_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "source_digest", lambda data: "")
    copy = shutil.copytree(folder, tmp_path / "copy")
    train = open_cache(settings(copy, tmp_path / "cache")).train
    shutil.rmtree(copy)
    assert open_cache(settings(copy, tmp_path / "cache")).train.tolist() == train.tolist()


@pytest.mark.parametrize("named", ["data_files: ../rows/train.jsonl", "data_dir: ../rows"])
def test_files_that_a_dataset_s_card_names_elsewhere_are_part_of_the_source(
    tmp_path: Path, named: str
) -> None:
    """A cache was read after they had changed."""
    rows, card = tmp_path / "rows" / "train.jsonl", tmp_path / "described" / "README.md"
    rows.parent.mkdir()
    card.parent.mkdir()
    card.with_name("train.jsonl").write_text(json.dumps({"text": "not read"}))
    card.write_text(f"---\nconfigs:\n- config_name: default\n  {named}\n---\n")

    def first_words() -> str:
        cache = open_cache(settings(card.parent, tmp_path / "cache"))
        return bytes(cache.validation[:5].tolist()).decode()

    for text in ("alpha", "gamma", "zeta "):
        rows.write_text(json.dumps({"text": text + " delta" * len(text)}) + "\n")
        assert first_words() == text
    assert first_words() == "zeta "


def test_a_prepared_dataset_with_a_card_is_found_without_opening_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card may name files of the hub; those in the folder count once, by whatever path."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    names = "data_files: train-*.jsonl"
    (copy / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {names}\n---\n")
    monkeypatch.chdir(tmp_path)
    train = open_cache(settings(Path("copy"), tmp_path / "cache")).train
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert open_cache(settings(Path("copy"), tmp_path / "cache")).train.tolist() == train.tolist()


def test_a_tokenizer_of_its_own(folder: Path, tmp_path: Path) -> None:
    cache = open_cache(settings(folder, tmp_path, tokenizer="bpe:280"))
    assert 256 < cache.tokenizer.vocab_size <= 280
    assert len(cache.tokenizer.encode(["alpha beta"])[0]) == 2, "trained on the text"
    assert "alpha" in cache.tokenizer.decode(cache.train[:50].tolist()) + cache.tokenizer.decode(
        cache.validation.tolist()
    )
    assert (
        open_cache(settings(folder, tmp_path, tokenizer="bpe:280"), cache.tokenizer).folder
        == cache.folder
    )
    given = open_cache(settings(folder, tmp_path, tokenizer="bytes"), cache.tokenizer)
    assert given.train.tolist() == cache.train.tolist()


def test_what_is_left_out_is_counted(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / "train-2.jsonl").open("a") as file:
        file.write('{"text": " "}\n{"text": null}\n{"text": "the last"}\n')
    with pytest.raises(ValueError, match=r"row 434 holds no text in column 'text'"):
        open_cache(settings(copy, tmp_path / "cache"))
    cache = open_cache(settings(copy, tmp_path / "cache", bad_rows="skip"))
    assert bytes(cache.train[-9:].tolist()) == b"the last\0"
    assert json.loads((cache.folder / "meta.json").read_text())["skipped"] == {"empty text": 2}
    assert (
        cache.skipped()
        == f"2 of {ROWS + 3} rows were left out, as data.bad_rows says (2 x empty text)"
    )


def test_the_same_texts_held_out_otherwise_are_another_cache(tmp_path: Path) -> None:
    texts, folders, corpora = tmp_path / "texts.jsonl", set(), set()
    texts.write_text("".join(f'{{"text": "{word}"}}\n' for word in 3 * ["s\\u00e4me"]))
    for held_out in (1, 2):
        data = DataSettings(path=str(texts), cache=str(tmp_path), validation_samples=held_out)
        cache = open_cache(data)
        folders.add(cache.folder)
        corpora.add(cache.corpus)
        assert cache.store.state.validation_bytes == 5 * held_out, "of UTF-8"
    assert len(folders) == len(corpora) == 2


def test_what_selects_rows_is_part_of_the_name_of_a_dataset_s_cache(
    folder: Path, tmp_path: Path
) -> None:
    data, spread = settings(folder, tmp_path), {"validation_samples": 0}
    changes = [{}, {"bad_rows": "skip"}, spread, {**spread, "validation_fraction": 0.1}]
    names = {begin_cache(replace(data, **change)).folder.name for change in changes}
    assert len(names) == len(changes)


@pytest.mark.parametrize(("ids", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_have_a_type_that_has_all_ids(ids: int, dtype: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = ids
    store = TokenStore(tmp_path / "store", lambda state: iter(()), "text", lambda: tokenizer)
    assert store.state.dtype == dtype
