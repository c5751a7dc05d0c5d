"""Checkpoints of islands that share no folder, in ranks that each work in a folder of their own."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.testing import run_on_ranks
from adloco.run.machine_folders import check_machine
from adloco.run.saving import Copies
from adloco.run.training_run import TrainingRun
from tests.problems import without_timings
from tests.run.test_training_run import numbers

ROUND_2 = "checkpoints/round-000002-step-00000008"
CONFIG = ("--run.tokens", "3072", "--run.checkpoint_every", "1", "--run.folder", "run")


def begin(machines: list[Path], words: list[str], copies: Copies | None = None) -> None:
    """Train two rounds, in folders of two machines."""
    os.chdir(machines[this_rank()])
    flags, _ = take_settings(words)
    recipe = build_recipe(override(read_values("diloco"), flags))
    run = TrainingRun.create(recipe, copies=copies)
    for record in run.rounds():
        if record["round"] == 2:
            break


@pytest.mark.parametrize(
    "file", ["recipe.toml", "checkpoints/round-000001-step-00000004/worker-1.json"]
)
def test_a_machine_with_another_run_there_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("another")
    said = check_machine(tmp_path, "this")
    assert said.startswith(f"run folder '{tmp_path}' has another run on ")
    assert bool(check_machine(tmp_path, "another")) == file.endswith("json")
    assert check_machine(tmp_path / "new", "this") == ""


def go_on(machines: list[Path], lost: Path) -> tuple[str, list[dict[str, Any]]]:
    """Continue without the files of rank 1's machine, then with its worker's on rank 0's."""
    os.chdir(machines[this_rank()])
    problem = ""
    try:
        TrainingRun.resume(Path("run"))
    except ValueError as error:
        problem = str(error)
    if this_rank() == 0:
        for file in (lost / ROUND_2).glob("worker-1.*"):
            shutil.copy(file, Path("run") / ROUND_2)
    run = TrainingRun.resume(Path("run"))
    list(run.rounds())
    return problem, run.records.read()


def num_bytes(checkpoint: Path, part: str) -> int:
    """Bytes of the tensors of a part."""
    tensors = load_file(checkpoint / f"{part}.safetensors").values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def without_checkpoints(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what checkpoints have sent."""
    return [{key: line[key] for key in line if key != "bytes_checkpoint"} for line in lines]


@pytest.mark.nightly
def test_each_keeps_its_own_parts_and_fetches_what_it_lacks(
    small: list[str], tmp_path: Path
) -> None:
    assert main(["train", "diloco", *small, *CONFIG[:4]]) == 0
    expected = numbers(tmp_path / "run")
    machines = [tmp_path / "zero", tmp_path / "one"]
    for machine in machines:
        machine.mkdir()
    zero, one = (machine / "run" for machine in machines)
    run_on_ranks(begin, 2, machines, [*small, *CONFIG])
    for folder, parts in ((zero, {"run", "trainer-0", "worker-0"}), (one, {"worker-1"})):
        assert {file.stem for file in (folder / ROUND_2).iterdir()} == parts
    crossing = [(zero, "run"), (zero, "trainer-0"), (one, "worker-1")]
    crossed = sum(num_bytes(folder / ROUND_2, part) for folder, part in crossing)

    lost = tmp_path / "lost"
    one.rename(lost)
    (of_zero, history), (of_one, _) = run_on_ranks(go_on, 2, machines, lost)
    assert of_zero == of_one
    assert "round-000002-step-00000008: worker-1 is missing" in of_zero
    assert [line.pop("bytes_checkpoint") for line in history] == [0, 0, crossed]
    assert all(line.pop("bytes_checkpoint") == 0 for line in expected)
    assert [without_timings(line) for line in history] == expected
    assert {path.name for path in one.iterdir()} == {
        "checkpoints",
        "environment.json",
        "model",
        "recipe.toml",
        "tokenizer",
    }
