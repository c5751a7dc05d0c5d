"""Runs whose numbers are not finite: what is saved, and how a run goes on."""

import math
from pathlib import Path

import pytest

from adloco.cli.arguments import take_settings
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.errors import NonFiniteLossError
from adloco.run.checkpoint import list_checkpoints
from adloco.run.training_run import TrainingRun
from tests.run.test_training_run import lines


def test_an_infinite_outer_state_is_not_saved(small: list[str], tmp_path: Path) -> None:
    settings, _ = take_settings([*small, "--run.checkpoint_every", "1"])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    with pytest.raises(
        NonFiniteLossError,
        match=r"global parameters of trainer 0; .*; the last good checkpoint is .*round-00000",
    ):
        for record in run.rounds():
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
