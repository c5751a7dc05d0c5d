"""Checkpoints of earlier versions, with the state of all workers in one file, are read on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from adloco.cli.main import main
from adloco.distributed.plain_state import split_state
from adloco.run.checkpoint import Checkpoint, list_checkpoints
from adloco.run.part_file import read_part
from adloco.whole_file import checksum
from tests.run.test_training_run import numbers


def write_whole(checkpoint: Path, state: dict[str, Any]) -> None:
    """What the version before parts wrote."""
    plain, tensors = split_state(state)
    save_file(tensors, checkpoint / "tensors.safetensors")
    whole = {"format": "adloco checkpoint 2", "state": plain}
    (checkpoint / "state.json").write_text(json.dumps(whole))
    sums = {name: checksum(checkpoint / name) for name in ("tensors.safetensors", "state.json")}
    (checkpoint / "checksums.json").write_text(json.dumps(sums))


def joined(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint in parts as the version before parts had it."""
    run = read_part(checkpoint, "run")
    counters = run["algorithm"]
    trainers = [
        {**numbers, "outer": read_part(checkpoint, f"trainer-{numbers['trainer']}")["outer"]}
        for numbers in counters["trainers"]
    ]
    workers = {
        worker: {**numbers, **read_part(checkpoint, f"worker-{worker}")["inner"]}
        for worker, numbers in counters["workers"].items()
    }
    none: dict[str, Any] = {"outers_before": {}, "workers_before": {}}
    return {
        "run": run["run"],
        "algorithm": counters | none | {"trainers": trainers, "workers": workers},
    }


def test_a_run_of_the_version_before_goes_on_bit_for_bit(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "diloco", *small, "--run.tokens", "3072", "--run.checkpoint_every", "1"]
    assert main([*words, "--run.keep_checkpoints", "9"]) == 0
    run = tmp_path / "run"
    expected = numbers(run)
    checkpoints = list_checkpoints(run / "checkpoints")
    state = joined(checkpoints[2])
    for checkpoint in checkpoints[2:]:
        shutil.rmtree(checkpoint)
    checkpoints[2].mkdir()
    write_whole(checkpoints[2], state)
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert f"{expected[1]['val_loss']:.4f}" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 0
    assert numbers(run) == expected
    with (checkpoints[2] / "state.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match=r"is damaged .state.json does not match its checksum"):
        Checkpoint(checkpoints[2]).read("worker-0")
