"""Checkpoints are written while training continues, and count when they are on disk."""

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.plain_state import split_state
from adloco.run import saving, training_run
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
    gc.freeze()  # What other tests have left is not looked at again and again.
    for _ in run.rounds():
        run.saving.wait()
        assert written
        for _ in range(500):  # Until the thread that has written them lets go of them.
            gc.collect()
            if not any(tensor() is not None for tensor in written):
                break
            time.sleep(0.01)
        else:
            pytest.fail("copies are still there")
    gc.unfreeze()


@pytest.mark.parametrize(("limit", "in_place"), [(10**8, 1), (0, 4)])
def test_a_large_state_in_host_memory_is_written_from_where_it_is(
    small: list[str], monkeypatch: pytest.MonkeyPatch, limit: int, in_place: int
) -> None:
    """No checkpoint of a large run takes a copy of the state, nor does the last one of any run."""
    monkeypatch.setattr(training_run, "COPIED_PARAMETERS", limit)
    flags, _ = take_settings([*small, "--run.tokens", "4096", "--run.checkpoint_every", "1"])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), flags)))
    live, as_written = list[bool](), list[bool]()

    def write(checkpoint: Path, name: str, state: Any) -> None:
        write_part(checkpoint, name, state)
        if name == "trainer-0":
            params = run.algorithm.trainers[0].outer.global_params
            own = list(zip(state["outer"]["params"], params, strict=True))
            live.append(all(saved.data_ptr() == now.data_ptr() for saved, now in own))

    monkeypatch.setattr(saving, "write_part", write)
    for _ in run.rounds():
        if limit == 0:
            assert not run.saving.in_progress
            saved = read_part(list_checkpoints(run.folder / "checkpoints")[-1], "trainer-0")[
                "outer"
            ]
            params = run.algorithm.trainers[0].outer.global_params
            as_written.append(all(map(torch.equal, saved["params"], params)))
    assert len(live) == 4
    assert sum(live) == in_place
    assert all(as_written)
