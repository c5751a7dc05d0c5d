"""A run that is killed at a named point goes on as if nothing had happened."""

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from adloco.distributed.testing import run_on_ranks
from adloco.run.training_run import TrainingRun
from tests.conftest import small_flags
from tests.problems import without_timings
from tests.run.test_training_run import make_run

POINTS = {
    "the first inner step": ("adloco.algorithms.worker:Worker._step", 1),
    "an inner step": ("adloco.algorithms.worker:Worker._update", 20),
    "a fragment is sent": ("adloco.algorithms.outer_sync:OuterSync.start", 7),
    "a fragment is received": ("adloco.algorithms.outer_sync:OuterSync.step", 6),
    "a merge": ("adloco.algorithms.round:apply_merge", 1),
    "the records of a round": ("adloco.run.records:_append", 4),
    "the first file of a checkpoint": ("adloco.run.part_file:save_tensors", 8),
    "between two files of a part": ("adloco.run.part_file:checksum", 20),
    "the last part of a checkpoint": ("adloco.run.part_file:write_text", 12),
    "old checkpoints are removed": ("adloco.run.saving:remove_old", 3),
    "the summary": ("adloco.run.training_run:summarise", 1),
}
"""Where the process is killed: a function, and at which call of it."""
IN_SUITE = ("an inner step", "a fragment is received", "a merge", "between two files of a part")


def words(corpus: Path, folder: Path) -> list[str]:
    streaming = ["--streaming.fragments", "2", "--streaming.tau", "1"]
    merging = ["--merge.first_round", "2", "--merge.every", "2", "--run.checkpoint_every", "1"]
    sizes = ["--method.num_trainers", "2", "--method.workers_per_trainer", "2"]
    short = ["--run.rounds", "4", "--inner.optimizer", "adamw"]
    return ["adloco", *small_flags(corpus, folder), *sizes, *streaming, *merging, *short]


def train_and_die(line: list[str], point: str, call: int) -> None:
    """Train, and be killed as the function is called for this time."""
    module, _, path = point.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function, calls = getattr(owner, name), [0]

    def killed(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(owner, name, killed)
    run = make_run(line[0], line[1:])
    assert list(run.rounds())
    run.finish()


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [without_timings(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe, *settings = words(corpus, folder)
    assert list(make_run(recipe, settings).rounds())
    return numbers(folder / "run")


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.nightly)
        for name in POINTS
    ],
)
def test_killed_at(
    name: str, corpus: Path, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    line, folder = words(corpus, tmp_path), tmp_path / "run"
    with pytest.raises(RuntimeError, match="the process died"):
        run_on_ranks(train_and_die, 1, line, *POINTS[name])
    written = len(numbers(folder)) if (folder / "metrics.jsonl").exists() else 0
    run = TrainingRun.resume(folder)
    assert run.algorithm.state.rounds_done >= written - 1, "at most one round is repeated"
    rounds = len(list(run.rounds()))
    assert run.finish()["rounds"] == len(undisturbed) >= rounds
    assert numbers(folder) == undisturbed
