"""Checkpoints are written while training continues, and count when they are on disk."""

import threading
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.arguments import take_settings
from adloco.config.recipe import build_recipe, override, read_values
from adloco.run import saving
from adloco.run.checkpoint import list_checkpoints
from adloco.run.part_file import read_part, write_part
from adloco.run.training_run import TrainingRun


def test_training_continues_while_a_checkpoint_is_written(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 3 ends while the checkpoint of round 2 waits to be written; that of round 4 waits."""
    flags, _ = take_settings([*small, "--run.tokens", "4096", "--run.checkpoint_every", "2"])
    flags = [*flags, ("inner.optimizer", "adamw")]
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), flags)))
    first, may_write = run.saving.newest, threading.Event()

    def write_late(checkpoint: Path, name: str, state: Any) -> None:
        assert may_write.wait(60)
        write_part(checkpoint, name, state)

    monkeypatch.setattr(saving, "write_part", write_late)
    rounds = run.rounds()
    for _ in range(3):
        record = next(rounds)
    assert record["round"] == 3
    assert run.saving.in_progress
    assert run.saving.newest == first
    moments = run.saving.snapshot["worker-0"]["inner"]["optimizers"][0]["state"][0]["exp_avg"]
    live = run.algorithm.workers[0].optimizers[0].state_dict()["state"][0]["exp_avg"]
    assert not moments.equal(live), "it is a copy from before round 3"
    may_write.set()
    assert [record["round"] for record in rounds] == [4]
    second, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert run.saving.newest == last.name
    assert not run.saving.in_progress
    saved = read_part(second, "worker-0")["inner"]["optimizers"][0]["state"][0]["exp_avg"]
    assert saved.equal(moments)
