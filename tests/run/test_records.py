"""Reading the records of a run."""

import json
from pathlib import Path

from adloco.run.records import TAIL_BYTES, Records


def test_the_newest_line_is_found_from_the_end(tmp_path: Path) -> None:
    file, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    assert records.newest() == {}
    file.write_text('{"round": 1')
    assert records.newest() == {}, "a line that was cut off does not count"
    file.write_text('{"round": 1}\n')
    assert records.newest() == {"round": 1}
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert records.newest() == {"round": 2}
    # Longer than what is read at first: many short lines, and lines that are longer than it.
    file.write_text("".join(json.dumps({"round": number}) + "\n" for number in range(20_000)))
    assert file.stat().st_size > 3 * TAIL_BYTES
    assert records.newest() == {"round": 19_999}
    long = {"round": 7, "text": "x" * 2 * TAIL_BYTES}
    file.write_text(json.dumps(long) + "\n")
    assert records.newest() == long
    file.write_text('{"round": 1}\n' + json.dumps(long) + "\n")
    assert records.newest() == long


def test_rounds_without_lines_are_named(tmp_path: Path) -> None:
    """A full and a lost file, and lines of rounds after the checkpoint's, which are cut."""
    metrics, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    steps = tmp_path / "steps.jsonl"
    rest = '"trainer": 0, "worker": 0, "inner_step": 1, "samples": 2, "loss": 0.5'
    steps.write_text("".join(f'{{"round": {at // 2}, {rest}}}\n' for at in range(2, 20)))
    metrics.write_text("".join(f'{{"round": {number}}}\n' for number in (1, 5, 7, 8)))
    assert records.cut(7) == [
        f"{metrics} has lost the lines of rounds 2 to 4, 6; the run goes on from its checkpoint of "
        "round 7, and its report leaves them out"
    ]
    assert [line["round"] for line in records.read()] == [1, 5, 7]
    assert [line["round"] for line in records.steps()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    steps.unlink()
    assert records.cut(1) == [
        f"{steps} has lost the lines of round 1; the run goes on from its checkpoint of round 1, "
        "and its report leaves them out"
    ]


def test_records_with_nothing_to_cut_are_not_written_again(tmp_path: Path) -> None:
    """The disk may be full."""
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "loss": 0.1, "text": "\\u00e9"}\n')
    before = (tmp_path / "metrics.jsonl").stat()
    Records(tmp_path).cut(1)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
