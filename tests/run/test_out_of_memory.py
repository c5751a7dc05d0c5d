"""Memory runs out on one rank of an island: `adloco train --ranks N` starts the ranks again, from
the newest checkpoint, with smaller passes.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco.cli.main import main
from adloco.tasks import language_model
from tests.conftest import Train
from tests.problems import cases

SMALL_RANK = """
import os

if os.environ.get("RANK") == "1":
    import torch
    import adloco.tasks.language_model as tasks

    plain, calls = tasks.next_token_loss, 0

    def loss(model, ids):
        global calls
        calls += torch.is_grad_enabled()
        many = len(ids) > LARGE and calls > 25 or LARGE >= len(ids) > FITS and calls > 3
        if torch.is_grad_enabled() and many:
            raise torch.OutOfMemoryError("no memory left")
        return plain(model, ids)

    tasks.next_token_loss = loss
"""
"""Rank 1 runs out in step 26 of the first attempt, and in step 2 of the one with half the
micro-batch.
"""


@contextmanager
def small_rank(folder: Path, *, large: int, fits: int) -> Iterator[None]:
    """Let the passes of rank 1 run out of memory in processes that are started within."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        SMALL_RANK.replace("LARGE", str(large)).replace("FITS", str(fits))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learned(line: dict[str, Any]) -> list[Any]:
    """Results of a round, to compare exactly: the same passes ran in the same order."""
    first = line["trainers"][0]
    return [
        line["round"],
        line["tokens"],
        line["train_loss"],
        line["val_loss"],
        first["requested_batch"],
        first["trainer_batch"],
        first["micro_batch"],
    ]


FLAGS = ["ddp", "--batch.initial", "16", "--run.keep_checkpoints", "9", "--ranks", "2"]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("island", "limits", "by_hand"),
    cases(
        {
            "replicas, twice": ([], (4, 2), True),
            "shards": (
                ["--placement.shard_size", "2", "--placement.replica_size", "1"],
                (4,),
                False,
            ),
        },
        default=("shards",),
    ),
)
def test_an_island_continues_with_smaller_micro_batches(
    island: list[str],
    limits: tuple[int, ...],
    by_hand: bool,
    small: list[str],
    tmp_path: Path,
    train: Train,
) -> None:
    """If `by_hand`, the same is trained from that checkpoint on with the limit as a setting."""
    run, other, fits = tmp_path / "run", tmp_path / "other", limits[-1]
    with small_rank(tmp_path / "startup", large=4, fits=fits):
        done = train([*FLAGS, *small, "--run.tokens", "16000", *island])
    assert done.returncode == 0, done.stderr
    said = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("adloco: the ranks start again")
    ]
    assert said == [
        (
            "adloco: the ranks start again from the newest checkpoint, with micro-batches of at "
            f"most {limit}"
        )
        for limit in limits
    ]
    assert f"set switch.pass_limit 4, as adloco train --resume {run} does" in done.stderr
    assert "Traceback" not in done.stderr
    lines = metrics(run)
    assert [line["round"] for line in lines] == list(range(1, 9))
    assert lines[-1]["tokens"] >= 16_000
    assert [line["trainers"][0]["micro_batch"] for line in lines] == [8] * 5 + [fits] * 3
    assert {line["trainers"][0]["trainer_batch"] for line in lines} == {16}, (
        "the batch is what it was"
    )

    if not by_hand:
        return
    shutil.copytree(run, other)
    (other / "out_of_memory.jsonl").unlink()
    for checkpoint in (other / "checkpoints").iterdir():
        if not checkpoint.name.startswith(("round-000000", "round-000005")):
            shutil.rmtree(checkpoint)
    done = train(["--resume", str(other), "--switch.pass_limit", str(fits), "--ranks", "2"])
    assert done.returncode == 0, done.stderr
    assert [learned(line) for line in metrics(other)] == [learned(line) for line in lines]


@pytest.mark.usefixtures("warm_python")
def test_one_sample_that_does_not_fit_ends_the_run(
    small: list[str], tmp_path: Path, train: Train
) -> None:
    with small_rank(tmp_path / "startup", large=4, fits=0):
        done = train([*FLAGS, *small, "--switch.pass_limit", "1"])
    assert done.returncode == 2
    assert (
        "memory ran out with micro-batches of 1 on cpu; one sample does not fit; make the model or "
        "the samples smaller" in done.stderr
    )
    assert "start again" not in done.stderr


def test_a_halved_micro_batch_is_recorded_reported_and_resumed(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = language_model.next_token_loss

    def of_at_most_two(model: Any, ids: Any) -> Any:
        if torch.is_grad_enabled() and len(ids) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return plain(model, ids)

    monkeypatch.setattr(language_model, "next_token_loss", of_at_most_two)
    run = tmp_path / "run"
    longer = ["--run.tokens", "2500", "--learning_rate.shape", "constant"]
    assert main(["train", "single", *small, *longer]) == 0
    (change,) = metrics(run)[0]["changes"]
    assert (change["setting"], change["after"], change["reason"]) == (
        "pass_limit",
        2,
        "memory ran out",
    )
    assert main(["report", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--run.tokens", "2x"]) == 0
    assert all(not row["changes"] for row in metrics(run)[1:]), "the limit is kept"
