"""A run that is taken back to an earlier round."""

import json
import shutil
from pathlib import Path

import pytest

from adloco import train
from adloco.config.setting_words import take_settings
from adloco.run.changes import read_changes
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


def test_changes_of_rounds_that_are_trained_again_are_forgotten(
    small: list[str], tmp_path: Path
) -> None:
    """Two resumes lower the learning rate; the run goes back to the first, then without it."""
    settings, _ = take_settings([*small, "--run.checkpoint_every", "1", "--inner.lr", "0.003"])
    given = dict(settings) | {"run.keep_checkpoints": "9", "learning_rate.shape": "constant"}
    folder = tmp_path / "run"
    train("diloco", **given | {"run.tokens": "0", "run.rounds": "1"})
    for rounds, rate in ((2, 0.002), (3, 0.001)):
        train(resume=folder, **{"run.rounds": rounds, "inner.lr": rate})

    def recorded() -> list[tuple[int, str]]:
        return [(change.round, change.after) for change in read_changes(folder)]

    assert recorded() == [(1, "0.002"), (2, "0.001")]
    go_back(folder, 1)
    assert recorded() == [(1, "0.002")]
    train(resume=folder, **{"inner.lr": 0.003})
    assert recorded() == []
    # Nor are those after the checkpoint to resume from, if they came back to its value.
    for rounds, rate in ((4, 0.001), (5, 0.003)):
        train(resume=folder, **{"run.rounds": rounds, "inner.lr": rate})
    assert recorded() == [(3, "0.001"), (4, "0.003")]
    for checkpoint in list_checkpoints(folder / CHECKPOINTS)[-2:]:
        shutil.rmtree(checkpoint)
    train(resume=folder)
    assert recorded() == []


def test_a_run_that_became_longer_twice_goes_back_to_before(
    small: list[str], tmp_path: Path
) -> None:
    """Rounds have 1,024 tokens. The warm-up's fraction is 0.012 at once, and 0.012000000000000002
    by way of 4,500 tokens.
    """
    settings, _ = take_settings([*small, "--run.checkpoint_every", "1", "--run.tokens", "3000"])
    given = dict(settings) | {"learning_rate.shape": "wsd", "learning_rate.warmup_fraction": "0.02"}
    train("diloco", **given | {"run.keep_checkpoints": "9"})
    folder = tmp_path / "run"
    for round, tokens in ((1, 4500), (2, 5000)):
        go_back(folder, round)
        train(resume=folder, **{"run.tokens": tokens})
    before = losses(folder)
    go_back(folder, 1)
    train(resume=folder)
    assert losses(folder) == before and len(before) == 5


def test_a_run_that_failed_and_was_taken_back_has_failed(folder: Path) -> None:
    """Without its last line, which says that it ended, the run was killed."""
    starts = folder / "starts.jsonl"
    starts.write_text(starts.read_text().splitlines(keepends=True)[0])
    go_back(folder, 1)
    summary = train(resume=folder).summary
    assert (summary["interruptions"], summary["tokens_repeated"]) == (1, 0)
    _, back, *_ = read_starts(folder)
    assert back.kind == "rewind" and back.seconds_lost == summary["seconds_lost"]


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
