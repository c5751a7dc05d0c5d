"""Runs whose numbers are not finite: what is saved, and how a run continues."""

import json
import math
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.errors import NonFiniteLossError
from adloco.run.changes import Changed, skipped_by
from adloco.run.checkpoint import list_checkpoints
from adloco.run.training_run import TrainingRun
from adloco.whole_file import checksums
from tests.run.test_training_run import lines, numbers


def test_an_infinite_outer_state_is_not_saved(small: list[str], tmp_path: Path) -> None:
    settings, _ = take_settings([*small, "--run.checkpoint_every", "1"])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    with pytest.raises(
        NonFiniteLossError,
        match=r"global parameters of trainer 0; .*; the last good checkpoint is .*round-00000",
    ):
        for record in run.rounds():
            run.saving.wait()
            good = list_checkpoints(tmp_path / "run" / "checkpoints")
            assert good[-1].name.startswith(f"round-{record['round']:06d}")
            run.algorithm.trainers[0].outer.momentum()[0].view(-1)[0] = math.inf
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == good


def test_a_run_that_restores_its_workers_ends_with_a_report(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With such a learning rate, each inner step but the first of a worker is not finite."""
    words = ["train", "diloco", *small, "--inner.lr", "1e30", "--run.rounds", "2"]
    assert main([*words, "--run.on_nonfinite", "restore"]) == 0
    (first, _) = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["restarts"] > 0 for row in first["workers"])
    assert "worker 0 of trainer 0 started again" in capsys.readouterr().out
    text = (tmp_path / "run" / "report.html").read_text()
    assert "numbers not finite" in text
    assert '"restarts": ' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_gets_past_a_reproducible_failure(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the learning rate that it began with, no resume would ever end otherwise."""
    folder = tmp_path / "run"
    assert main(["train", "diloco", *small, "--inner.lr", "1e30"]) == 2
    error = capsys.readouterr().err
    assert f"adloco train --resume {folder} continues from there, with a lower inner.lr" in error
    assert main(["train", "--resume", str(folder)]) == 2
    assert not (folder / "changes.jsonl").exists()
    lower = ["--inner.lr", "0.002", "--data.skip_samples", "5"]
    assert main(["train", "--resume", str(folder), *lower]) == 0
    assert lines(folder / "changes.jsonl") == [
        {"round": 0, "setting": "data.skip_samples", "before": "0", "after": "5"},
        {"round": 0, "setting": "inner.lr", "before": "1e+30", "after": "0.002"},
    ]
    sentence = "inner.lr was changed from 1e+30 to 0.002 after round 0"
    assert f"WARNING {sentence}" in (folder / "train.log").read_text()
    assert sentence in (folder / "report.html").read_text()
    assert "\nlr = 0.002\n" in (folder / "recipe.toml").read_text()


def test_a_stream_gets_past_a_bad_row(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume refused what the message of the row advised."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [f"row {number}" for number in range(300)]
    rows[270] = ""
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    stream = ["--data.dataset", str(dataset), "--data.streaming", "true"]
    words = [*small, "--data.path", "", *stream, "--data.validation_samples", "30"]
    words += ["--run.rounds", "6", "--run.checkpoint_every", "1"]
    skip, whole = ["--data.bad_rows", "skip"], str(tmp_path / "whole")
    assert main(["train", "diloco", *words, *skip, "--run.folder", whole]) == 0
    assert main(["train", "diloco", *words]) == 2
    assert "or leave such rows out with data.bad_rows skip" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), *skip]) == 0
    (change,) = lines(tmp_path / "run" / "changes.jsonl")
    assert change["setting"] == "data.bad_rows" and 0 < change["round"] < 6
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert main(["evaluate", str(tmp_path / "run")]) == 0


def test_what_was_changed_trains_as_if_the_run_had_begun_with_it(
    small: list[str], tmp_path: Path
) -> None:
    """Up to the checkpoint at the start, where nothing was trained."""
    words = [*small, "--run.rounds", "2"]
    # In the order of the recipe, in which changes are recorded.
    settings = [("data.skip_samples", "7"), ("method.max_grad_norm", "0.1"), ("inner.lr", "0.001")]
    flags = [word for name, value in settings for word in (f"--{name}", value)]
    assert main(["train", "diloco", *words, *flags, "--run.folder", str(tmp_path / "whole")]) == 0
    given, _ = take_settings([*words, "--inner.lr", "0.01"])
    TrainingRun.create(build_recipe(override(read_values("diloco"), given)))
    for _ in range(2):  # The first was killed before its first checkpoint.
        run = TrainingRun.resume(tmp_path / "run", settings)
    assert len(list(run.rounds())) == 2
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert [line["setting"] for line in lines(tmp_path / "run" / "changes.jsonl")] == [
        name for name, _ in settings
    ]
    # What was skipped is skipped once: without flags, the run stands where it stood.
    again = TrainingRun.resume(tmp_path / "run")
    positions = [worker.position for worker in run.algorithm.workers.values()]
    assert [worker.position for worker in again.algorithm.workers.values()] == positions
    with pytest.raises(
        ValueError, match="data.skip_samples may only grow on resume, and the run in .*, got 3"
    ):
        TrainingRun.resume(tmp_path / "run", [("data.skip_samples", "3")])
    with pytest.raises(ValueError, match="--inner.weight_decay cannot change when a run is"):
        TrainingRun.resume(tmp_path / "run", [("inner.weight_decay", "0.5")])
    with pytest.raises(ValueError, match="--evaluation.windows cannot change"):  # Losses of others.
        TrainingRun.resume(tmp_path / "run", [("evaluation.windows", "0")])


def test_a_run_that_has_spent_its_budget_takes_no_other_settings(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it becomes longer. A refusal changes no file."""
    folder = tmp_path / "run"
    words = ["--run.tokens", "1024", "--learning_rate.shape", "constant"]
    assert main(["train", "diloco", *small, *words]) == 0

    def files() -> dict[str, str]:
        return {name: found for name, found in checksums(folder).items() if name != ".lock"}

    before = files()
    capsys.readouterr()
    lower = ["train", "--resume", str(folder), "--inner.lr", "0.001"]
    assert main(lower) == 2
    error = capsys.readouterr().err
    assert f"the run in {folder} has spent its budget (1,024 / 1,024 tokens), so a " in error
    assert "change of inner.lr has no effect; leave it out, or" in error
    assert files() == before
    assert main([*lower, "--run.tokens", "2x"]) == 0


def test_a_change_that_no_checkpoint_has_is_not_recorded_any_more(
    small: list[str], tmp_path: Path
) -> None:
    """The run resumes twice from the same checkpoint: what failed in between trained no round."""
    folder = tmp_path / "run"
    words = ["--run.rounds", "1", "--run.tokens", "0", "--learning_rate.shape", "constant"]
    words += ["--inner.lr", "0.01"]
    assert main(["train", "diloco", *small, *words]) == 0
    resume = ["train", "--resume", str(folder), "--run.rounds", "2"]

    def recorded() -> list[tuple[str, str]]:
        return [(line["before"], line["after"]) for line in lines(folder / "changes.jsonl")]

    assert main([*resume, "--inner.lr", "1e30"]) == 2
    assert recorded() == [("0.01", "1e+30")]
    TrainingRun.resume(folder, [("inner.lr", "0.002")])
    assert recorded() == [("0.01", "0.002")]
    assert main([*resume, "--inner.lr", "0.01"]) == 0
    assert not (folder / "changes.jsonl").exists()


def test_what_a_resume_leaves_out_beside_what_the_run_has_left_out() -> None:
    first = Changed(round=1, setting="data.skip_samples", before="5", after="7")
    rate = Changed(round=1, setting="inner.lr", before="4", after="9")
    assert skipped_by([first, rate]) == 2
