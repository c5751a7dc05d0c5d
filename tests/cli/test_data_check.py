"""`adloco prepare --check`: what it shows of files, of datasets and of labelled texts."""

import json
import re
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.data.data_file import SourceUnreachableError

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """It knows two words."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


def rows(path: Path, texts: list[str], labels: list[int] | None = None) -> Path:
    lines = [
        {"text": text, "label": (labels or [0] * len(texts))[i]} for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    common = ["--check", "--processes", "1", "--data.cache", str(tmp_path / "cache")]
    assert main(["prepare", "single", *words, *common]) == 0
    return capsys.readouterr().out


def table(out: str) -> dict[str, list[str]]:
    lines = [line.split() for line in out.splitlines() if re.match(r" (train|valid)", line)]
    return {line[0]: line[1:] for line in lines}


def test_a_file(
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("adloco.cli.progress.SECONDS_PER_LINE", 0.0)
    monkeypatch.setattr("adloco.cli.data_check.BLOCK", 5)
    # Held out is the first row. Tokens: 2 + 1, and 2 + 1, 4 + 1, 1 + 1 with the ends of texts.
    path = rows(tmp_path / "a.jsonl", ["one two", "one one", "one six\ttwo two", "two"])
    words = ["--data.path", str(path), "--data.validation_samples", "1"]
    words += ["--data.tokenizer", str(tokenizer), "--data.context_tokens", "4"]
    out = check(words, tmp_path, capsys)
    assert f"rows of data.path {str(path)!r} as they are read\n  'one two'\n  'one one'\n" in out
    assert "  'one six\\ttwo two'\n" in out  # No character is hidden.
    assert table(out) == {
        "train": ["10", "3", "1", "2.0", "4", "10.000%"],
        "validation": ["3", "1", "2", "2.0", "2", "0.000%"],
    }
    # Without a terminal a line says how far it is.
    assert "tokenising: 4 rows, 13 tokens" in out
    assert "counting train tokens: 50%\ncounting train tokens: 100%\n" in out
    # Windows 0 .. 4 and 4 .. 8 of one one [SEP] one [UNK] two two [SEP] two [SEP].
    assert "of 2 samples to train on: 4 tokens" in out
    assert "  'one one [SEP] one [UNK]'\n  '[UNK] two two [SEP] two'\n" in out


def test_a_dataset_with_and_without_its_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts are too short for one sample."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows(folder / "train.jsonl", ["ab", "cdef"])
    rows(folder / "validation.jsonl", ["ab"])
    words = ["--data.dataset", str(folder), "--data.validation_split", "validation"]
    out = check(words, tmp_path, capsys)
    assert "as they are read\n  'ab'\n  'cdef'\n" in out
    assert table(out) == {
        "train": ["8", "2", "2", "3.0", "4"],
        "validation": ["3", "1", "2", "2.0", "2"],
    }
    assert "too short for one sample of 128 tokens" in out

    def unreachable(*arguments: object) -> None:
        raise SourceUnreachableError("no network")

    monkeypatch.setattr("adloco.cli.data_check.open_rows", unreachable)
    again = check(words, tmp_path, capsys)
    assert "rows as they are read: no network" in again and table(again) == table(out)


def test_labelled_texts(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one two", "one", "two six two", "one one one one"]
    path = rows(tmp_path / "a.jsonl", texts, [0, 1, 1, 0])
    words = ["--task.kind", "classification", "--data.path", str(path), "--data.tokenizer"]
    words += [str(tokenizer), "--data.validation_samples", "1", "--data.context_tokens", "5"]
    words += ["--task.evaluation_per_class", "0"]
    out = check(words, tmp_path, capsys)
    assert "with their labels\n  '1: one'\n  '1: two six two'\n  '0: one one one one'\n" in out
    # With [CLS] and [SEP], cut at five: 3, and 3, 5, 5 tokens.
    assert table(out) == {
        "train": ["13", "3", "3", "5.0", "5", f"{1 / 13:.3%}"],
        "validation": ["4", "1", "4", "4.0", "4", "0.000%"],
    }
    assert "of 3 samples to train on, at most 5 tokens\n  '[CLS] one [SEP]'\n" in out
    assert "0 of the 1 texts that are held out are among those to train on" in out
    assert "2 texts to train on have 5 tokens" in out
    assert "labels to train on: 1 x 0, 2 x 1; to evaluate on: 1 x 0, 0 x 1" in out


def test_the_most_frequent_label_is_that_of_the_evaluated_texts(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four texts that are held out have label 0, but one of each class is evaluated."""
    path = rows(tmp_path / "a.jsonl", ["one"] * 6, [0, 0, 0, 1, 0, 1])
    words = ["--task.kind", "classification", "--data.path", str(path), "--data.tokenizer"]
    words += [str(tokenizer), "--data.validation_samples", "4", "--task.evaluation_per_class", "1"]
    out = check(words, tmp_path, capsys)
    assert "to evaluate on: 1 x 0, 1 x 1, so always the most frequent one is right for 50.0%" in out


def test_of_many_labels_the_first_are_shown(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "a.jsonl", ["one"] * 4, [0, 0, 31, 0])
    words = ["--task.kind", "classification", "--data.path", str(path), "--data.tokenizer"]
    words += [str(tokenizer), "--data.validation_samples", "1", "--task.evaluation_per_class", "0"]
    out = check(words, tmp_path, capsys)
    assert "labels to train on: 2 x 0, 0 x 1, " in out
    assert "0 x 19 and 12 labels more; to evaluate on: 1 x 0, " in out


def test_held_out_text_that_is_trained_on_is_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the rows are one text; of the first two, which are held out, one."""
    same, others = "a" * 100, [letter * 100 for letter in "bcd"]
    path = rows(tmp_path / "a.jsonl", [same, others[0], same, others[1], same, others[2]])
    words = ["--data.path", str(path), "--data.validation_samples", "2"]
    out = check(words, tmp_path, capsys)
    # Of 202 tokens 139 places have 63 behind them; 38 of these, and the end of the text, stand in
    # the other rows: 37 within the text, and one with its end.
    assert "at 27.3% of the places in the text that is held out, the next 64 tokens stand in" in out

    labelled = rows(tmp_path / "b.jsonl", ["one", "two", "one", "one one"], [0, 1, 0, 1])
    words = ["--task.kind", "classification", "--data.path", str(labelled), "--data.tokenizer"]
    words += [str(tokenizer), "--data.validation_samples", "2", "--data.context_tokens", "5"]
    out = check([*words, "--task.evaluation_per_class", "0"], tmp_path, capsys)
    assert "1 of the 2 texts that are held out are among those to train on, too, by the" in out
