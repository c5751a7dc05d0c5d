"""Rows of datasets and files: which are read, which validate, what becomes of those that cannot be
used.
"""

import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adloco.data.data_file import SourceUnreachableError
from adloco.data.data_settings import DataSettings
from adloco.data.hub import dataset_file
from adloco.data.rows import Position, Rows, open_rows, stages
from tests.data.reading import SplitRows, read_all
from tests.problems import SHARED_DATA, needs_shared_data

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
TEXT = {"text": str}


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def numbered(start: int, stop: int) -> bytes:
    return lines(
        {"text": f"text {index}", "label": index % 2, "other": None} for index in range(start, stop)
    )


def write(folder: Path, files: Mapping[str, bytes]) -> str:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.fixture
def local(tmp_path: Path) -> str:
    """30 rows in three files, and a validation split of 5."""
    files = {f"train-{file}.jsonl": numbered(10 * file, 10 * file + 10) for file in range(3)} | {
        "validation.jsonl": numbered(100, 105)
    }
    return write(tmp_path / "local", files)


def texts(data: DataSettings, split: Any) -> list[int]:
    return [int(row["text"].removeprefix("text ")) for row in SplitRows(data, split, TEXT)]


def test_splits_samples_and_starts(local: str) -> None:
    given = DataSettings(
        dataset=local, validation_split="validation", samples=25, validation_samples=3
    )
    assert (texts(given, "train"), texts(given, "validation")) == (list(range(25)), [100, 101, 102])
    position = Position(row=22, files=2, rows_of_files=20)
    rest = [number for number, _ in open_rows(given, stages(given)[-1], TEXT, position)]
    assert rest == [22, 23, 24]
    every = DataSettings(dataset=local, validation_fraction=0.1)
    assert texts(every, "validation") == [9, 19, 29]
    assert sorted([*texts(every, "train"), 9, 19, 29]) == list(range(30))
    first = DataSettings(dataset=local, validation_samples=4, samples=12)
    assert (texts(first, "train"), texts(first, "validation")) == (list(range(4, 12)), [0, 1, 2, 3])


def test_texts_beside_a_validation_split_are_whole_and_all_rows_count(local: str) -> None:
    read = read_all(DataSettings(dataset=local, validation_split="validation"))
    assert read.train == [f"text {index}" for index in range(30)]
    assert read.validation == [f"text {index}" for index in range(100, 105)]
    assert read.rows == 35


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.15, 0.3, 0.35, 0.4, 0.45, 0.5])
def test_the_held_out_share_is_the_fraction(fraction: float) -> None:
    """Of the first n rows, floor(n fraction) are held out: 3 of 10 for 0.3, not every third."""
    (stage,) = stages(DataSettings(validation_fraction=fraction))
    held_out = [stage.split_of(row) == "validation" for row in range(1000)]
    hundredths = round(100 * fraction)
    assert [sum(held_out[:n]) for n in range(1001)] == [n * hundredths // 100 for n in range(1001)]


def test_a_share_of_1_in_k_is_every_kth_row_as_ever() -> None:
    for every in (2, 4, 5, 8, 10, 20, 25, 50, 100):
        (stage,) = stages(DataSettings(validation_fraction=1 / every))
        assert [row for row in range(5 * every) if stage.split_of(row) == "validation"] == [
            every * (index + 1) - 1 for index in range(5)
        ]


def test_files_are_split_like_datasets(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "files", {"rows.jsonl": numbered(0, 30)})) / "rows.jsonl"
    assert texts(DataSettings(path=str(path), validation_samples=4, samples=12), "train") == list(
        range(4, 12)
    )


def test_columns_and_their_types(local: str) -> None:
    data = DataSettings(dataset=local, samples=3, validation_samples=1)
    assert list(SplitRows(data, "train", {"text": str, "label": int})) == [
        {"text": "text 1", "label": 1},
        {"text": "text 2", "label": 0},
    ]
    with pytest.raises(ValueError, match="column 'text' is not a whole number but str"):
        list(SplitRows(data, "train", {"text": int}))
    with pytest.raises(
        ValueError,
        match="train-0.jsonl row 1: column 'label' is not text but int; name a column that is",
    ):
        list(SplitRows(data, "train", {"label": str}))
    with pytest.raises(
        ValueError, match=r"has no column 'sentiment'; name one of \['text', 'label', 'other'\]"
    ):
        list(SplitRows(data, "train", {"sentiment": int}))
    with pytest.raises(
        ValueError,
        match=r"has no column 'body'; set data.text_column to one of \['text', 'label', 'other'\]",
    ):
        list(SplitRows(DataSettings(dataset=local, text_column="body"), "train", {"body": str}))


def test_only_the_rows_asked_for_are_read(local: str) -> None:
    for file in (1, 2):
        (Path(local) / f"train-{file}.jsonl").write_bytes(b"no JSON at all")
    assert texts(DataSettings(dataset=local, samples=10, validation_samples=1), "train") == list(
        range(1, 10)
    )


def test_reading_resumes_anywhere_without_opening_what_was_read(local: str) -> None:
    data = DataSettings(dataset=local, samples=28)
    (stage,) = stages(data)
    whole = list(open_rows(data, stage, TEXT, Position()))
    assert [number for number, _ in whole] == list(range(28))
    for cut in (0, 1, 9, 10, 11, 20, 27, 28):
        rows = open_rows(data, stage, TEXT, Position())
        before = [item for item, _ in zip(rows, range(cut), strict=False)] if cut else []
        files = (cut - 1) // 10 if cut else 0
        resumed = Position(row=cut, files=files, rows_of_files=10 * files)
        assert before + list(open_rows(data, stage, TEXT, resumed)) == whole
    (Path(local) / "train-0.jsonl").write_bytes(b"damaged")
    assert (
        len(list(open_rows(data, stage, TEXT, Position(row=12, files=1, rows_of_files=10)))) == 16
    )


BAD: dict[str, tuple[bytes, str, int, str]] = {
    "empty": (
        lines([{"text": "a"}, {"text": ""}, {"text": "b"}]),
        "row 2 holds no text in column 'text'; fill or remove it",
        2,
        "empty text",
    ),
    "null": (
        lines([{"text": "a"}, {"text": None}]),
        "row 2 holds no text in column 'text'",
        1,
        "empty text",
    ),
    "JSON": (
        numbered(0, 2) + b'{"text": \n',
        "cannot be read from row 1 on (",
        0,
        "unreadable file",
    ),
    "bytes": (
        b'{"text":"caf\xe9"}\n',
        "cannot be read from row 1 on ('utf-8' codec can't decode",
        0,
        "unreadable file",
    ),
    "columns": (lines([{"body": "x"}]), "has no column 'text'", 0, "unreadable file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_of_a_dataset(name: str, tmp_path: Path) -> None:
    content, message, kept, reason = BAD[name]
    folder = write(
        tmp_path / "bad",
        {
            "train-0.jsonl": numbered(0, 2),
            "train-1.jsonl": content,
            "train-2.jsonl": numbered(2, 4),
        },
    )
    with pytest.raises(ValueError) as error:
        list(SplitRows(DataSettings(dataset=folder), "train", TEXT))
    assert "bad/train-1.jsonl" in str(error.value)
    assert message in str(error.value) or name == "columns"
    assert str(error.value).endswith("or leave such rows out with data.bad_rows skip")
    rows = SplitRows(DataSettings(dataset=folder, bad_rows="skip"), "train", TEXT)
    assert len(list(rows)) == 4 + kept
    ((counted, count),) = rows.skipped.items()
    assert counted.startswith(reason)
    assert count == 1


@pytest.mark.parametrize("start", [b"", b"xx"])
def test_a_damaged_gzip_file(start: bytes, tmp_path: Path) -> None:
    files = {
        "train-0.json.gz": gzip.compress(numbered(0, 7)),
        "train-1.json.gz": start + gzip.compress(numbered(0, 5000))[:-2000],
    }
    folder = write(tmp_path / "bad", files)
    with pytest.raises(
        ValueError,
        match=r"train-1.json.gz cannot be read from row 1 on \(.*\); mend or fetch the file again",
    ):
        list(SplitRows(DataSettings(dataset=folder), "train", TEXT))
    rows = SplitRows(
        DataSettings(dataset=folder, bad_rows="skip", validation_samples=1), "train", TEXT
    )
    assert len(list(rows)) == 6
    assert sum(rows.skipped.values()) == 1
    (Path(folder) / "train-0.json.gz").write_bytes(b"xx")
    with pytest.raises(
        ValueError,
        match=r"cannot be opened \(Not a gzipped file .*\); mend or remove its first file, "
        r"from which the columns of all files are taken",
    ):
        list(SplitRows(DataSettings(dataset=folder, bad_rows="skip"), "train", TEXT))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = write(tmp_path / "bad", {"train-1.parquet": b"PAR1, or not"})
    parquet.write_table(
        pyarrow.table({"text": [f"text {index}" for index in range(9)]}),
        tmp_path / "bad" / "train-0.parquet",
    )
    for data in (DataSettings(dataset=folder), DataSettings(path=folder)):
        with pytest.raises(
            ValueError,
            match=r"train-1.parquet (cannot be read|is not a readable parquet file) from row 1 on "
            r".*; mend or ",
        ):
            list(SplitRows(data, "train", TEXT))
        rows = SplitRows(replace(data, bad_rows="skip"), "train", TEXT)
        assert len(list(rows)) == 9
        assert sum(rows.skipped.values()) == 1


def test_a_file_that_vanishes(local: str) -> None:
    for data in (DataSettings(dataset=local), DataSettings(path=local)):
        rows = iter(SplitRows(data, "train", TEXT))
        next(rows)
        (Path(local) / "train-1.jsonl").rename(Path(local) / "away")
        with pytest.raises(
            ValueError, match=r"train-1.jsonl is gone.*; restore it, or leave such rows out"
        ):
            list(rows)
        (Path(local) / "away").rename(Path(local) / "train-1.jsonl")
    rows = SplitRows(DataSettings(dataset=local, bad_rows="skip"), "train", TEXT)
    reading = iter(rows)
    next(reading)
    (Path(local) / "train-1.jsonl").unlink()
    # There are 21 rows, with one for the missing file. One of them is held out, one was read
    # before, and the missing file's is left out.
    assert sum(1 for _ in reading) == 18
    ((reason, count),) = rows.skipped.items()
    assert reason.startswith("vanished file: ")
    assert "train-1.jsonl is gone" in reason
    assert count == 1


def test_a_hostile_line_kills_no_run(tmp_path: Path) -> None:
    hostile = [b"[" * 100_000, b'{"text": ' * 100_000, b'{"text": "b", "n": ' + b"9" * 5000 + b"}"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "a"}', *hostile, b'{"text": "z"}']))
    rows = SplitRows(DataSettings(path=str(path), bad_rows="skip"), "train", TEXT)
    assert [row["text"] for row in rows] == ["a", "z"]
    assert rows.skipped == {"not JSON": 3}
    with pytest.raises(ValueError, match=r"line 2 is not JSON \(maximum recursion depth exceeded"):
        list(SplitRows(DataSettings(path=str(path)), "train", TEXT))


def test_a_record_of_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    damaged = pyarrow.array([b"a", b"caf\xe9", b"c", b"\xff", b"e"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": damaged}), path)
    rows = SplitRows(DataSettings(path=str(path), bad_rows="skip"), "train", TEXT)
    assert [row["text"] for row in rows] == ["a", "c", "e"]
    assert rows.skipped == {"not UTF-8": 2}
    with pytest.raises(ValueError, match="row 2 is not UTF-8 text .byte 3.; convert it"):
        list(SplitRows(DataSettings(path=str(path)), "train", TEXT))


@pytest.mark.parametrize("label", [-1, 1 << 16, 10**4000])
def test_a_label_that_is_no_class(label: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([{"text": "a", "label": 1}, {"text": "b", "label": label}]))
    columns = {"text": str, "label": int}
    rows = SplitRows(DataSettings(path=str(path), bad_rows="skip"), "train", columns)
    assert [row["label"] for row in rows] == [1]
    with pytest.raises(ValueError, match="'label' must hold whole numbers from 0 to 65,535, got"):
        list(SplitRows(DataSettings(path=str(path)), "train", columns))


def test_bad_lines_of_a_file_are_skipped_one_by_one(tmp_path: Path) -> None:
    content = (
        b'{"text": "a"}\n{"text": \n{"body": "b"}\n\n{"text": "caf\xe9"}\n'
        b'{"text": "a\\ud800"}\n{"text": " "}\n{"text": "z"}\n'
    )
    folder = write(
        tmp_path / "files",
        {"rows.jsonl": content, "latin.txt": "café".encode("latin-1"), "blank.txt": b" \n"},
    )
    rows = SplitRows(DataSettings(path=folder, bad_rows="skip"), "train", TEXT)
    assert list(rows) == [{"text": "a"}, {"text": "z"}]
    assert rows.skipped == {
        "empty text": 2,
        "not UTF-8": 2,
        "not JSON": 1,
        "no such column": 1,
        "half a surrogate pair": 1,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dataset": "allenai/c4", "config": "en"},
            r"'allenai/c4' cannot be reached \(.*\); download it and give its folder",
        ),
        ({"dataset": "/no/such/folder"}, "'/no/such/folder' does not exist; download it"),
        ({"path": "/no/such/folder"}, "does not exist"),
    ],
)
def test_what_cannot_be_reached(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SourceUnreachableError, match=message):
        list(SplitRows(DataSettings(**settings), "train", TEXT))  # type: ignore[arg-type]


def test_unknown_configurations_and_splits_and_empty_folders(local: str, tmp_path: Path) -> None:
    for settings, message in [
        (
            {"dataset": local, "config": "xx"},
            r"cannot be opened with data.config 'xx' \(.*'default'.*\); set data.config to one of",
        ),
        (
            {"dataset": local, "split": "trian"},
            "has no split 'trian'; set data.split or data.validation_split to one of train, "
            "validation",
        ),
        ({"dataset": write(tmp_path / "none", {})}, "holds no data files that can be read"),
        (
            {"dataset": write(tmp_path / "binary", {"x.bin": b"x"})},
            "holds no data files that can be read",
        ),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            list(SplitRows(DataSettings(**settings), "train", TEXT))  # type: ignore[arg-type]
        assert not isinstance(error.value, SourceUnreachableError)


class BrokenStream:
    """A dataset's stream that fails after two rows."""

    column_names = ("text",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def select_columns(self, columns: list[str]) -> "BrokenStream":
        return self

    def skip(self, rows: int) -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        yield {"text": "b"}
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("reset"),
        TimeoutError("late"),
        RuntimeError("odd"),
        OSError(28, "No space left on device"),
    ],
)
def test_nothing_is_left_out_for_what_may_go_away(error: Exception) -> None:
    file = dataset_file(BrokenStream(error), "part 1", "text")
    rows = Rows(
        files=[file],
        columns=TEXT,
        data=DataSettings(bad_rows="skip"),
        limit=0,
        position=Position(),
    )
    with pytest.raises(
        SourceUnreachableError,
        match=r"part 1 cannot be reached from row 3 on \(.*\); try again when it can be",
    ):
        list(rows)
    damaged = dataset_file(BrokenStream(OSError("Unexpected end of stream")), "part 1", "text")
    rows = Rows(
        files=[damaged],
        columns=TEXT,
        data=DataSettings(bad_rows="skip"),
        limit=0,
        position=Position(),
    )
    assert len(list(rows)) == 2
    assert sum(rows.position.skipped.values()) == 1


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError,
        match="'allenai/c4' needs the library datasets; install it with: pip install "
        "'adloco.datasets.'",
    ):
        list(SplitRows(DataSettings(dataset="allenai/c4"), "train", TEXT))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"path": "a", "dataset": "b"},
            "give one of data.path, data.dataset and data.factory, got 'a', 'b' and ''",
        ),
        ({"config": "en"}, "config is for dataset, got 'en' without one"),
        ({"streaming": True, "dataset": "b"}, "data.streaming needs text to validate on"),
        ({"samples": -1}, "samples must be >= 0, got -1"),
        (
            {"samples": 5, "validation_samples": 5},
            "samples must be > validation_samples = 5",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**settings)


@needs_shared_data
def test_rows_in_the_hubs_layout() -> None:
    hub = SHARED_DATA / "hub_like"
    c4 = DataSettings(
        dataset=str(hub / "allenai" / "c4"),
        config="en",
        validation_split="validation",
        samples=300,
        validation_samples=20,
    )
    assert sum(1 for _ in SplitRows(c4, "train", TEXT)) == 300
    assert sum(1 for _ in SplitRows(c4, "validation", TEXT)) == 20
    # Rows of the second file, against the file itself.
    with gzip.open(hub / "allenai" / "c4" / "en" / "c4-train.00001-of-00004.json.gz", "rt") as file:
        expected = [json.loads(line)["text"] for line in file][50:100]
    assert [row["text"] for row in SplitRows(c4, "train", TEXT)][250:] == expected
    imdb = DataSettings(
        dataset=str(hub / "stanfordnlp" / "imdb"), validation_split="test", samples=10
    )
    rows = list(SplitRows(imdb, "train", {"text": str, "label": int}))
    assert len(rows) == 10
    assert all(row["label"] in (0, 1) and row["text"] for row in rows)
