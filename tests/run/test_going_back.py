"""A run that is taken back to an earlier round."""

import json
from pathlib import Path

import pytest

from adloco import train
from adloco.cli.arguments import take_settings
from adloco.run.checkpoint import list_checkpoints
from adloco.run.folder import CHECKPOINTS, locked
from adloco.run.going_back import go_back
from adloco.run.starts import read_starts


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["val_loss"] for line in lines]


@pytest.fixture
def folder(small: list[str], tmp_path: Path) -> Path:
    every_round = ["--run.checkpoint_every", "1", "--run.keep_checkpoints", "9"]
    settings, _ = take_settings([*small, "--run.tokens", "2500", *every_round])
    folder = tmp_path / "run"
    train("diloco", **dict(settings))
    return folder


def test_a_run_taken_back_trains_to_the_same_numbers(folder: Path) -> None:
    before, rounds = losses(folder), len(losses(folder))
    assert rounds >= 3

    aside = go_back(folder, 1)

    assert losses(folder) == before[:1]
    assert not (folder / "summary.json").exists()
    assert [name.removeprefix("undone-").split("-")[1] for name in aside] == [
        f"{round:06d}" for round in range(2, rounds + 1)
    ]
    assert len(list_checkpoints(folder / CHECKPOINTS)) == 2

    summary = train(resume=folder).summary
    assert losses(folder) == before
    # What was given up on purpose is not lost.
    assert (summary["interruptions"], summary["tokens_repeated"], summary["goodput"]) == (0, 0, 1.0)
    kinds = [start.kind for start in read_starts(folder)]
    assert kinds == ["begin", "stop", "rewind", "resume", "stop"]
    # A second return takes the place of what the first one has set aside.
    assert go_back(folder, 1) == aside


def test_a_machine_that_has_only_parts_of_workers(folder: Path) -> None:
    """Rank 0, on another machine, has the parts `run`, the records and the starts."""
    for file in [*folder.glob("checkpoints/*/run.*"), *folder.glob("*.jsonl")]:
        file.unlink()
    with pytest.raises(ValueError, match="no part of a checkpoint of round 99"):
        go_back(folder, 99)
    aside = go_back(folder, 1)
    assert aside
    assert not (folder / "starts.jsonl").exists()
    kept = {path.name for path in (folder / CHECKPOINTS).iterdir()} - {*aside}
    assert {name.split("-")[1] for name in kept} == {"000000", "000001"}


def test_what_cannot_be_gone_back_to_is_refused_and_nothing_changes(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    rounds = len(losses(folder))
    with pytest.raises(ValueError, match="no checkpoint of round 99"):
        go_back(folder, 99)
    with pytest.raises(ValueError, match=f"at round {rounds} already"):
        go_back(folder, rounds)
    with locked(folder), pytest.raises(ValueError, match="in use by another process"):
        go_back(folder, 1)
    first = list_checkpoints(folder / CHECKPOINTS)[1]
    (first / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        go_back(folder, 1)
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(ValueError, match="is not a run folder"):
        go_back(folder.parent, 1)
