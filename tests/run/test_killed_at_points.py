"""A run that is killed at a named point continues as if nothing had happened: in a new process, or
with the ranks that are left.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from torch.multiprocessing import ProcessExitedException

from adloco.distributed.testing import run_on_ranks
from adloco.run.checkpoint import list_all
from adloco.run.training_run import TrainingRun
from tests.conftest import Train, small_flags
from tests.dying import Point, die_at, ranks_that_die
from tests.pages import NEEDS_ELASTIC
from tests.problems import cases, numbers_of
from tests.run.test_training_run import make_run

POINTS = {
    "the first inner step": ("adloco.algorithms.worker:Worker._step", 1),
    "an inner step": ("adloco.algorithms.worker:Worker._update", 20),
    "a fragment is sent": ("adloco.algorithms.outer_sync:OuterSync.start", 7),
    "a fragment is received": ("adloco.algorithms.outer_sync:OuterSync.step", 6),
    "a merge": ("adloco.algorithms.round:apply_merge", 1),
    "the records of a round": ("adloco.run.json_files:RoundLines.add", 4),
    "the first file of a checkpoint": ("adloco.run.part_file:save_tensors", 8),
    "between two files of a part": ("adloco.run.part_file:checksum", 20),
    "the last part of a checkpoint": ("adloco.run.part_file:write_text", 12),
    "old checkpoints are removed": ("adloco.run.saving:remove_old", 3),
    "the summary": ("adloco.run.training_run:summarise", 1),
}
"""Where a run in one process is killed: a function, and at which call of it."""
IN_SUITE = ("a fragment is received", "a merge", "between two files of a part")


def words(corpus: Path, folder: Path) -> list[str]:
    streaming = ["--streaming.fragments", "2", "--streaming.tau", "1"]
    merging = ["--merge.first_round", "2", "--merge.every", "2", "--run.checkpoint_every", "1"]
    sizes = ["--method.num_trainers", "2", "--method.workers_per_trainer", "2"]
    short = ["--run.rounds", "4", "--inner.optimizer", "adamw"]
    return ["adloco", *small_flags(corpus, folder), *sizes, *streaming, *merging, *short]


def train_and_die(line: list[str], point: Point) -> None:
    die_at(point)
    run = make_run(line[0], line[1:])
    assert list(run.rounds())
    run.finish()


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe, *settings = words(corpus, folder)
    assert list(make_run(recipe, settings).rounds())
    return numbers_of(folder / "run")


@pytest.mark.parametrize("point", cases({name: [POINTS[name]] for name in POINTS}, IN_SUITE))
def test_killed_at(
    point: Point, corpus: Path, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    line, folder = words(corpus, tmp_path), tmp_path / "run"
    with pytest.raises(ProcessExitedException):
        run_on_ranks(train_and_die, 1, line, point)
    written = len(numbers_of(folder)) if (folder / "metrics.jsonl").exists() else 0
    run = TrainingRun.resume(folder)
    assert run.algorithm.state.rounds_done >= written - 1, "at most one round is repeated"
    rounds = len(list(run.rounds()))
    assert run.finish()["rounds"] == len(undisturbed) >= rounds
    assert numbers_of(folder) == undisturbed


ORDERED_SUM, MEETING = "adloco.distributed.comm.plain_sum:OrderedSum", "adloco.elastic.meeting"
COPIES = ["--run.copy_every", "1", "--run.checkpoint_every", "1000"]
INT4 = ["--wire.format", "int4"]
THREE = ["--method.num_trainers", "3", "--batch.initial", "6"]
STEP = ("adloco.algorithms.worker:Worker._update", 10)
ON_RANKS: dict[str, tuple[list[str], dict[int, Point]]] = {
    "the first inner step": ([], {1: (STEP[0], 1)}),
    "an inner step": ([], {1: STEP}),
    "before it sends its terms of a sum": ([], {1: (f"{ORDERED_SUM}.exchange", 4)}),
    "its terms of a sum are sent": ([], {1: (f"{ORDERED_SUM}.add_up", 3)}),
    "its share of a sum is sent": ([], {1: (f"{ORDERED_SUM}.finish", 4)}),
    "blocks of 4 bits are sent": (
        INT4,
        {1: ("adloco.distributed.comm.block_sums:start_all_to_all", 4)},
    ),
    "a merge begins": ([], {1: ("adloco.algorithms.round:apply_merge", 1)}),
    "the means of a merge are sent": ([], {1: (f"{ORDERED_SUM}.finish", 1)}),
    "the end of a merge": ([], {1: ("adloco.algorithms.merging:_AppliedFates.reassign", 1)}),
    "a copy in memory": (
        COPIES,
        {1: ("adloco.distributed.placement.placement:Placement.transfer", 6)},
    ),
    "between two files of its part": ([], {1: ("adloco.run.part_file:checksum", 12)}),
    "the last part of a checkpoint": ([], {1: ("adloco.run.part_file:write_text", 7)}),
    "the records of a round": ([], {0: ("adloco.run.json_files:RoundLines.add", 4)}),
    "the summary": (COPIES, {0: ("adloco.run.training_run:summarise", 1)}),
    "the meeting after a failure": (THREE, {2: STEP, 1: (f"{MEETING}:come", 2)}),
    "a decision of the meeting": (THREE, {2: STEP, 1: (f"{MEETING}:choose", 1)}),
    "the group after a meeting": (
        THREE,
        {2: STEP, 1: ("adloco.distributed.launch.launcher:wait_for_members", 2)},
    ),
}
"""Flags of a run on several ranks, and where each of its ranks is killed."""


def words_on_ranks(corpus: Path, folder: Path, extra: list[str]) -> list[str]:
    """One worker on each rank; trainers merge in round 2, so that later sums cross ranks."""
    settings = ["--run.checkpoint_every", "1", "--merge.every", "2", "--wire.format", "fp32"]
    return [*words(corpus, folder), *settings, "--method.workers_per_trainer", "1", *extra]


Undisturbed = Callable[[list[str]], Path]


@pytest.fixture(scope="module")
def undisturbed_alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder of a run with these flags in one process, which is trained once."""
    folders: dict[str, Path] = {}

    def find(extra: list[str]) -> Path:
        key = " ".join(extra)
        if key not in folders:
            folder = tmp_path_factory.mktemp("alone")
            recipe, *settings = words_on_ranks(corpus, folder, extra)
            run = make_run(recipe, settings)
            assert list(run.rounds())
            run.finish()
            folders[key] = folder / "run"
        return folders[key]

    return find


def without_copies(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One process alone sends nobody copies of its state."""
    return [{key: line[key] for key in line if key != "bytes_checkpoint"} for line in lines]


def last_tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a run's last checkpoint, by file."""
    files = list_all(folder / "checkpoints")[-1].glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


@NEEDS_ELASTIC
def test_all_points_exist() -> None:
    """Most of them are used at night only."""
    of_ranks = [point for _, deaths in ON_RANKS.values() for point in deaths.values()]
    for place, _ in (*POINTS.values(), *of_ranks):
        assert callable(resolve_name(place))


@pytest.mark.usefixtures("warm_python")
@NEEDS_ELASTIC
@pytest.mark.parametrize(
    ("extra", "deaths"),
    cases(ON_RANKS, default=("its terms of a sum are sent", "a copy in memory")),
)
def test_a_rank_is_killed_at(
    extra: list[str],
    deaths: dict[int, Point],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
    undisturbed_alone: Undisturbed,
) -> None:
    """The others take over its workers. In the end all numbers are those of one process."""
    alone = undisturbed_alone([flag for flag in extra if flag not in COPIES])
    monkeypatch.setenv("PYTHONPATH", ranks_that_die(tmp_path, deaths), prepend=os.pathsep)
    ranks = ["--ranks", "3" if extra == THREE else "2", "--run.on_rank_failure", "replace"]
    done = train([*words_on_ranks(corpus, tmp_path, extra), *ranks])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended by signal 9") == 1, done.stdout
    folder = tmp_path / "run"
    starts = (folder / "starts.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in starts]
    # There is nothing to regroup for where only the summary was missing.
    assert kinds in (["begin", "regroup", "stop"], ["begin", "stop"]), "in place, at once"
    assert (folder / "summary.json").exists()
    assert without_copies(numbers_of(folder)) == without_copies(numbers_of(alone))
    assert last_tensors(folder) == last_tensors(alone)


@pytest.mark.usefixtures("warm_python")
@NEEDS_ELASTIC
def test_a_rank_is_killed_in_the_round_after_a_failure(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
    undisturbed_alone: Undisturbed,
) -> None:
    """The failed rank has taken copies along, so those that remain make them again at once."""
    alone = undisturbed_alone(THREE)
    # In round 2, once all ranks have their copies of round 1; and as the next one trains it again.
    deaths = {
        2: ("adloco.algorithms.round:Round._gather", 2),
        0: ("adloco.run.training_run:TrainingRun._round", 3),
    }
    monkeypatch.setenv("PYTHONPATH", ranks_that_die(tmp_path, deaths), prepend=os.pathsep)
    ranks = ["--ranks", "3", "--run.on_rank_failure", "replace"]
    done = train([*words_on_ranks(corpus, tmp_path, [*THREE, *COPIES]), *ranks])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert [start["round"] for start in starts if start["kind"] == "regroup"] == [1, 1]
    assert without_copies(numbers_of(folder)) == without_copies(numbers_of(alone))
    assert last_tensors(folder) == last_tensors(alone)
