"""Reading the records of a run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adloco.metrics import Record
from adloco.run import json_files
from adloco.run.json_files import read_lines
from adloco.run.records import Records


def test_the_newest_complete_line_is_found(tmp_path: Path) -> None:
    file, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    assert records.newest() == {}
    file.write_text('{"round": 1')
    assert records.newest() == {}, "a line that was cut off does not count"
    file.write_text('{"round": 1}\n')
    assert records.newest() == {"round": 1}
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert records.newest() == {"round": 2}


def test_rounds_without_lines_are_named(tmp_path: Path) -> None:
    """A full and a lost file, and lines of rounds after the checkpoint's, which are cut."""
    metrics, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    steps = tmp_path / "steps.jsonl"
    rest = '"trainer": 0, "worker": 0, "inner_step": 1, "samples": 2, "loss": 0.5'
    steps.write_text("".join(f'{{"round": {at // 2}, {rest}}}\n' for at in range(2, 20)))
    metrics.write_text("".join(f'{{"round": {number}}}\n' for number in (1, 5, 7, 8)))
    assert records.cut(7) == [
        f"{metrics} has lost the lines of 4 of the 7 rounds up to the checkpoint; the report "
        "leaves them out"
    ]
    assert [line["round"] for line in records.read()] == [1, 5, 7]
    assert [line["round"] for line in records.steps()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    steps.unlink()
    assert records.cut(1) == [
        f"{steps} has lost the lines of 1 of the 1 rounds up to the checkpoint; the report leaves "
        "them out"
    ]


def test_records_with_nothing_to_cut_are_not_written_again(tmp_path: Path) -> None:
    """The disk may be full."""
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "loss": 0.1, "text": "\\u00e9"}\n')
    before = (tmp_path / "metrics.jsonl").stat()
    Records(tmp_path).cut(1)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_cut_parses_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run has many, and a resume waits for it."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"round": {n}}}\n' for n in range(1, 10)))
    parsed = []

    def counted(file: Path, *kind: type) -> Iterator[Record]:
        for line in read_lines(file, *kind):
            parsed.append(line["round"])
            yield line

    monkeypatch.setattr(json_files, "read_lines", counted)
    Records(tmp_path).cut(8)
    assert parsed == [*range(1, 10)]


def test_lines_out_of_order_are_damaged(tmp_path: Path) -> None:
    """A round has one line of metrics.jsonl, and several of steps.jsonl."""
    records = Records(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"round": {number}}}\n' for number in (1, 2, 2)))
    with pytest.raises(ValueError, match="line 3 of .*metrics.jsonl is damaged .round 2 behind"):
        records.read()
    rest = '"trainer": 0, "worker": 0, "inner_step": 1, "samples": 2, "loss": 0.5'
    steps = (tmp_path / "steps.jsonl").write_text
    steps("".join(f'{{"round": {number}, {rest}}}\n' for number in (1, 1, 2, 1)))
    with pytest.raises(ValueError, match="line 4 of .*steps.jsonl is damaged .round 1 behind"):
        list(records.steps())


def test_lines_that_the_run_did_not_write_are_named(tmp_path: Path) -> None:
    """Lines after the checkpoint's are cut on resume; a file without lines of a round is lost."""
    metrics, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    lines = [f'{{"round": {number}, "val_loss": 3.0}}\n' for number in (1, 2, 3)]
    metrics.write_text("".join(lines))
    records.cut(2)
    digests = records.digests()
    for good in (lines, lines[:2], lines[:1], lines[1:], []):
        metrics.write_text("".join(good))
        records.check_unchanged(digests, 2)
    metrics.unlink()
    records.check_unchanged(digests, 2)
    metrics.write_text("".join(lines).replace("3.0", "2.0", 1))
    with pytest.raises(ValueError, match="is not what the run wrote: lines up to round 2 were"):
        records.check_unchanged(digests, 2)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    for read in (Records(tmp_path).newest, Records(tmp_path).read):
        with pytest.raises(ValueError, match="metrics.jsonl is not a file; restore it from a copy"):
            read()
