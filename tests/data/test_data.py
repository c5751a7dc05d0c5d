"""Order, sources, corpora and caches."""

import errno
import json
import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco import TensorSource
from adloco.data.data_file import SourceUnreachableError
from adloco.data.data_settings import DataSettings
from adloco.data.files import cache_folder, data_files, files_at
from adloco.data.sources import StreamOrder, TokenSource
from adloco.data.token_cache import open_cache
from tests.data.reading import read_all


def test_an_epoch_has_every_sample_once() -> None:
    order = StreamOrder(num_samples=23, num_streams=3, seed=5)
    lengths = (8, 8, 7)
    for epoch in range(3):
        read = np.concatenate(
            [order.indices(stream, epoch * length, length) for stream, length in enumerate(lengths)]
        )
        assert sorted(read.tolist()) == list(range(23))
    assert order.indices(0, 0, 8).tolist() != order.indices(0, 8, 8).tolist()


def test_what_is_read_does_not_depend_on_how_much_at_once() -> None:
    order = StreamOrder(num_samples=23, num_streams=3, seed=5)
    whole = order.indices(1, 0, 30).tolist()
    assert whole == [int(order.indices(1, position, 1)[0]) for position in range(30)]
    assert whole == [*order.indices(1, 0, 7).tolist(), *order.indices(1, 7, 23).tolist()]
    assert whole == StreamOrder(num_samples=23, num_streams=3, seed=5).indices(1, 0, 30).tolist()
    assert whole != StreamOrder(num_samples=23, num_streams=3, seed=6).indices(1, 0, 30).tolist()


def test_windows_predict_each_token_once() -> None:
    source = TokenSource(np.arange(31, dtype=np.uint16), context_tokens=5, num_streams=2)
    assert source.num_windows == 6
    batch = torch.cat([source.read(0, 0, 3), source.read(1, 0, 3)])
    assert batch.dtype == torch.int64
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 31))
    assert (batch[:, 1:] - batch[:, :-1] == 1).all()


def test_tensor_source() -> None:
    first, second = torch.arange(10), torch.arange(10) * 2.0
    inputs, targets = TensorSource(first, second, num_streams=2, seed=1).read(1, 0, 5)
    assert sorted(inputs.tolist()) == [1, 3, 5, 7, 9]
    assert (inputs * 2.0).equal(targets)
    for uneven in ((first, second[:5]), ()):
        with pytest.raises(ValueError, match="same length"):
            TensorSource(*uneven, num_streams=1)
    with pytest.raises(ValueError, match="fewer than one for each of 11"):
        TensorSource(first, num_streams=11)


def test_the_default_corpus_is_the_standard_library() -> None:
    corpus = read_all(DataSettings())
    assert corpus == read_all(DataSettings())
    documents = [*corpus.train, *corpus.validation]
    assert len(documents) == len(set(documents)) > 300
    assert (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text() in documents
    assert 0.03 < len(corpus.validation) / len(documents) < 0.07
    assert not set(corpus.train) & set(corpus.validation)


def test_corpora_from_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("bravo")
    (tmp_path / "sub" / "a.txt").write_text("alpha " * 10)
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "row one\\u2028same row"}\n\n{"text": "row two"}\n'
    )
    corpus = read_all(DataSettings(path=str(tmp_path), validation_fraction=0.25))
    assert corpus.train == ["bravo", "row one\u2028same row", "row two"]
    assert corpus.validation == ["alpha " * 10]


def test_links_are_followed_and_notes_of_other_programs_left_out(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    (folder / ".cache").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / ".gitattributes").write_text("notes")
    (folder / ".cache" / "b.txt").write_text("notes")
    (elsewhere / "c.txt").write_text("charlie")
    (elsewhere / "round").symlink_to(folder)  # A loop.
    (folder / "more").symlink_to(elsewhere)
    settings = DataSettings(path=str(folder), validation_fraction=0.5)
    (folder / "again").symlink_to(elsewhere)  # Twice.
    (folder / "z").mkdir()
    (folder / "z" / "d.txt").write_text("delta")
    (folder / "b").symlink_to(folder / "z")
    corpus = read_all(settings)
    assert sorted(corpus.train + corpus.validation) == ["alpha", "charlie", "delta"]
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"gone\.txt is gone"):
        read_all(settings)


def test_a_folder_has_its_own_path_beside_links_to_it(tmp_path: Path) -> None:
    """Files are in the order of their paths, and a link moves no text that was there."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "z")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "d.txt").write_text("delta")
    (tmp_path / "m.txt").write_text("mike")
    found = [file.name for file in data_files(tmp_path, "text")]
    assert found == [str(tmp_path / name) for name in ("m.txt", "z/d.txt")]


def test_few_texts_keep_the_share_too(tmp_path: Path) -> None:
    """0.4 of 5 texts are two; 0.3 of 3 texts are none, so the end of each is held out."""
    for name in "abcde":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    five = read_all(DataSettings(path=str(tmp_path), validation_fraction=0.4))
    assert [text[0] for text in five.validation] == ["c", "e"]
    for name in "de":
        (tmp_path / f"{name}.txt").unlink()
    three = read_all(DataSettings(path=str(tmp_path), validation_fraction=0.3))
    assert three.validation == ["aaa", "bbb", "ccc"] and three.train[0] == "a" * 7
    (tmp_path / "f.txt").write_text(" ")
    settings = DataSettings(
        path=str(tmp_path), validation_fraction=0.3, cache=str(tmp_path / ".c"), bad_rows="skip"
    )
    cache = open_cache(settings)
    assert (cache.store.state.documents, cache.store.state.rows) == (3, 4)
    assert cache.skipped().startswith("1 of 4 rows were left out")
    with pytest.raises(ValueError, match="would be read as text; use another folder"):
        open_cache(replace(settings, cache=str(tmp_path / "c")))


def test_a_single_text_keeps_its_tail_for_validation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("0123456789" * 10)
    corpus = read_all(DataSettings(path=str(tmp_path / "one.txt"), validation_fraction=0.1))
    assert (corpus.train, corpus.validation) == (["0123456789" * 9], ["0123456789"])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"body": ["uno", "dos", "tres"], "n": [1, 2, 3]}), tmp_path / "rows.parquet"
    )
    corpus = read_all(
        DataSettings(path=str(tmp_path), text_column="body", validation_fraction=0.34)
    )
    assert [*corpus.train, *corpus.validation] == ["uno", "dos", "tres"]
    with pytest.raises(
        ValueError, match=r"has no column 'text'; set data.text_column to one of \['body', 'n'\]"
    ):
        read_all(DataSettings(path=str(tmp_path), validation_fraction=0.34))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), r"is not UTF-8 text \(byte 3\); convert it"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        (
            "column.jsonl",
            b'{"body": "a"}\n',
            "line 1 has no column 'text'; set data.text_column to one of .'body'.",
        ),
        ("number.jsonl", b'{"text": 3}\n', "column 'text' is not text"),
        (
            "surrogate.jsonl",
            b'{"text": "a\\ud800"}\n',
            "line 1 holds half a surrogate pair at character 1",
        ),
        ("list.jsonl", b"[1]\n", "line 1 has no column 'text'"),
        ("broken.parquet", b"PAR?", "not a readable parquet file"),
        ("rows.json", b'{"text": "a"}\n', "would be read as one text; name it .jsonl if each line"),
    ],
)
def test_bad_corpora(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_all(DataSettings(path=str(tmp_path / name), validation_fraction=0.1))


def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts would be missing from the run, and nobody would know."""
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("hello world " * 100)
    scandir = os.scandir

    def refusing(path: Any) -> Any:  # As for another user; root may list everything.
        if Path(path).name in ("closed", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ValueError, match="closed' of data.path cannot be read .Permission denied"):
        read_all(DataSettings(path=str(tmp_path), bad_rows="skip"))
    # A disk's root has a folder of its file system, which only root may list.
    (tmp_path / "closed").rename(tmp_path / "lost+found")
    assert files_at(tmp_path) == [tmp_path / "open" / "text.txt"]


def test_cache_is_written_once_and_keyed_by_source_and_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 100)
    data = DataSettings(path=str(text), validation_fraction=0.1, cache=str(tmp_path / "cache"))
    first = open_cache(data)
    assert bytes(first.train[:11].tolist()) == b"hello world"
    assert first.train[-1] == 0
    assert first.rows_read() is None
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    assert open_cache(data).folder == first.folder
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    assert (
        open_cache(
            DataSettings(
                path=str(text), validation_fraction=0.1, cache=data.cache, tokenizer="bpe:260"
            )
        ).folder
        != first.folder
    )
    text.write_text("hello worle " * 100)
    assert open_cache(data).folder != first.folder
    assert not list((tmp_path / "cache").glob(".writing-*"))
    assert json.loads((first.folder / "meta.json").read_text())["dtype"] == "uint16"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_a_failing_disk_is_named_and_skips_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, bad_rows: Any
) -> None:
    """It was taken for a cache that cannot be written, where bpe:SIZE is trained on the text."""
    text = tmp_path / "text.txt"
    text.write_text("some words")

    def read(file: Path) -> bytes:
        if file == text:
            raise OSError(errno.EIO, "Input/output error")
        with file.open("rb") as opened:
            return opened.read()

    monkeypatch.setattr(Path, "read_bytes", read)
    data = DataSettings(
        path=str(text), cache=str(tmp_path / "c"), tokenizer=tokenizer, bad_rows=bad_rows
    )
    with pytest.raises(SourceUnreachableError) as error:
        open_cache(data)
    assert str(error.value) == f"{text} cannot be read (Input/output error); mend or remove it"


@pytest.mark.parametrize("left", [[], ["pretrained/tokenizer.json"]])
def test_a_cache_that_was_never_begun_stands_in_the_way_of_no_tokenizer(
    tmp_path: Path, left: list[str]
) -> None:
    """A process was killed between making the folder and its first commit, or is not there yet."""
    (tmp_path / "text.txt").write_text("some words and more " * 50)
    data = DataSettings(
        path=str(tmp_path / "text.txt"),
        cache=str(tmp_path / "c"),
        tokenizer="bpe:300",
        context_tokens=16,
    )
    cache = open_cache(data)
    shutil.rmtree(cache.folder)
    cache.folder.mkdir()
    for name in left:
        (cache.folder / name).parent.mkdir()
        (cache.folder / name).write_text("{")
    again = open_cache(data, cache.tokenizer)
    assert again.train_windows(0) > 0
    assert again.corpus == cache.corpus


def test_two_texts_of_one_name_size_and_time_are_two_sources(tmp_path: Path) -> None:
    """Archives and images that are made reproducibly set all times to one value."""
    sources = list[DataSettings]()
    for word in ("left", "more"):
        file = tmp_path / word / "text.txt"
        file.parent.mkdir()
        file.write_text(word * 100)
        os.utime(file, (0, 0))
        cache = str(tmp_path / ".c")
        sources += [DataSettings(path=str(at), cache=cache) for at in (file, file.parent)]
    begins = [bytes(open_cache(data).train[:4].tolist()) for data in sources]
    assert begins == [b"left", b"left", b"more", b"more"]


@pytest.mark.parametrize(
    ("given", "shared", "expected"),
    [
        ("", "/shared/cache", "/shared/cache/adloco"),
        ("", "relative", "HOME/.cache/adloco"),
        ("", "", "HOME/.cache/adloco"),
        ("~/mine", "/shared/cache", "HOME/mine"),
    ],
)
def test_caches_are_where_the_setting_or_the_environment_says(
    given: str, shared: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert cache_folder(given) == Path(expected.replace("HOME", str(Path.home())))
