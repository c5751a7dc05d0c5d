"""Checkpoints are written while training continues, and count when they are on disk."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.arguments import take_settings
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.plain_state import split_state
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

    def moments() -> Any:
        return run.algorithm.workers[0].optimizers[0].state_dict()["state"][0]["exp_avg"]

    monkeypatch.setattr(saving, "write_part", write_late)
    rounds = run.rounds()
    for _ in range(2):
        next(rounds)
    of_second = moments().clone()
    assert next(rounds)["round"] == 3
    assert run.saving.in_progress
    assert run.saving.newest == first
    assert not moments().equal(of_second)
    may_write.set()
    assert [record["round"] for record in rounds] == [4]
    second, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert run.saving.newest == last.name
    assert not run.saving.in_progress
    saved = read_part(second, "worker-0")["inner"]["optimizers"][0]["state"][0]["exp_avg"]
    assert saved.equal(of_second)


def test_a_copy_is_not_kept_once_it_is_written(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would take twice the memory of its state for all its time."""
    flags, _ = take_settings([*small, "--run.tokens", "4096", "--run.checkpoint_every", "1"])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), flags)))
    written = list[weakref.ref[Any]]()

    def write(checkpoint: Path, name: str, state: Any) -> None:
        write_part(checkpoint, name, state)
        written.extend(map(weakref.ref, split_state(state)[1].values()))

    monkeypatch.setattr(saving, "write_part", write)
    for _ in run.rounds():
        run.saving.wait()
        gc.collect()
        assert written
        assert not any(tensor() is not None for tensor in written)
