"""Metrics that are null where they may be, and where they may not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.main import main
from adloco.metrics import PHASE, ROUND, SYNC, TRAINER, WORKER, Metric
from adloco.run.record_types import fault, metrics_line
from adloco.run.records import Records


def rows(line: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Metric]]]:
    yield line, ROUND
    yield line["sync"], SYNC
    yield from ((row, TRAINER) for row in line["trainers"])
    yield from ((row, WORKER) for row in line["workers"])
    yield from ((row, PHASE) for row in line["memory"].values())


def test_a_report_needs_only_the_metrics_that_are_always_numbers(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Its checkpoints would know the lines as they were.
    monkeypatch.setattr(Records, "digests", lambda records: {})
    assert main(["train", "adloco", *small, "--run.rounds", "2"]) == 0
    file = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        assert fault(line, metrics_line()) == ""
        for name in ("trainers", "workers"):
            assert fault(line | {name: []}, metrics_line()) == name
        for row, table in rows(line):
            for name, metric in table.items():
                value, row[name] = row[name], None
                found = fault(line, metrics_line()).rpartition(".")[2]
                assert found == (name if metric.always else "")
                row[name] = value if metric.always else None
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
