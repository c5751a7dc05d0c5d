"""Copies that a machine writes to its disk for another one."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.main import main
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.testing import run_on_ranks
from adloco.elastic.copies import MemoryCopies
from adloco.run.going_back import go_back
from adloco.run.training_run import TrainingRun
from tests.problems import without_timings
from tests.run.test_islands_folders import (
    CONFIG,
    ROUND_2,
    begin,
    num_bytes,
    numbers,
    without_checkpoints,
)


def go_on_alone(machines: list[Path]) -> list[dict[str, Any]]:
    """Continue with what the machines have."""
    os.chdir(machines[this_rank()])
    run = TrainingRun.resume(Path("run"), copies=MemoryCopies())
    list(run.rounds())
    return run.records.read()


def test_a_machine_whose_disk_fails_is_sent_all_it_had(small: list[str], tmp_path: Path) -> None:
    """The first one's, with the parts that only rank 0 writes."""
    assert main(["train", "diloco", *small, *CONFIG[:4]]) == 0
    expected = numbers(tmp_path / "run")
    machines = [tmp_path / "zero", tmp_path / "one"]
    for machine in machines:
        machine.mkdir()
    copies = ["--run.on_rank_failure", "replace", "--run.copy_every", "1000"]
    run_on_ranks(begin, 2, machines, [*small, *CONFIG, *copies], MemoryCopies())
    parts = {"run", "trainer-0", "worker-0", "worker-1"}
    for machine in machines:
        assert {file.stem for file in (machine / "run" / ROUND_2).iterdir()} == parts

    shutil.rmtree(machines[0] / "run")
    sizes = {part: num_bytes(machines[1] / "run" / ROUND_2, part) for part in parts}
    history, _ = run_on_ranks(go_on_alone, 2, machines)
    assert [without_timings(line) for line in without_checkpoints(history)] == (
        without_checkpoints(expected)[2:]
    )
    # All parts after each of two rounds, in both directions, and what the first machine was sent.
    sent = 3 * sum(sizes.values()) - sizes["worker-1"]
    assert [line["bytes_checkpoint"] for line in history] == [sent]
    left = list((machines[0] / "run").iterdir())
    assert not [path for path in left if path.name.startswith(".seen")]


def test_a_run_is_taken_back_on_all_machines(small: list[str], tmp_path: Path) -> None:
    """The second one has all parts of round 2, with which the run would continue."""
    machines = [tmp_path / "zero", tmp_path / "one"]
    for machine in machines:
        machine.mkdir()
    copies = ["--run.on_rank_failure", "replace", "--run.copy_every", "1000"]
    run_on_ranks(begin, 2, machines, [*small, *CONFIG, *copies], MemoryCopies())
    go_back(machines[0] / "run", 1)
    with pytest.raises(Exception, match="was taken back to round 1 on one machine, and another"):
        run_on_ranks(go_on_alone, 2, machines)
    go_back(machines[1] / "run", 1)
    history, _ = run_on_ranks(go_on_alone, 2, machines)
    assert [line["round"] for line in history] == [1, 2, 3]
