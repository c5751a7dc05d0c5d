"""`run.keep_best`: the checkpoint with the lowest evaluation loss stays, for `--best`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import adloco
from adloco.cli.main import main
from adloco.run.checkpoint import list_checkpoints
from adloco.run.part_file import read_tensors
from adloco.run.training_run import TrainingRun
from tests.run.test_training_run import make_run

UNSTEADY = ["--run.keep_best", "--run.keep_checkpoints", "1"]
UNSTEADY += ["--learning_rate.shape", "constant", "--learning_rate.warmup_fraction", "1"]
UNSTEADY += ["--inner.optimizer", "adamw", "--inner.lr", "0.05", "--run.tokens", "6000"]
UNSTEADY += ["--outer.lr", "1.5", "--outer.options", "{ momentum = 0.9, nesterov = true }"]


def kept(folder: Path) -> dict[str, Any]:
    """The tensors of each file of each checkpoint."""
    files = [file for each in list_checkpoints(folder / "checkpoints") for file in each.iterdir()]
    return {
        f"{file.parent.name}/{file.name}": {
            name: tensor.tolist() for name, tensor in read_tensors(file).items()
        }
        for file in files
        if file.suffix == ".safetensors" and file.stem != "run"
    }


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.nightly), 100])
def test_a_run_that_gets_worse_and_is_killed(
    every: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate rises all the time and the outer step overshoots: the loss falls from 3.6
    to 2.0 in the first rounds and rises to 6.8 in the others, far enough for any CPU's rounding.
    """
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = [*small, *UNSTEADY, "--run.checkpoint_every", str(every)]
    records = list(make_run("diloco", [*words, "--run.folder", str(whole)]).rounds())
    losses = [record["val_loss"] for record in records]
    best = losses.index(min(losses))
    assert 0 < best < len(losses) - 2
    names = sorted({name.partition("/")[0] for name in kept(whole)})
    assert [name[:12] for name in names] == [f"round-{best + 1:06d}", f"round-{len(losses):06d}"]

    rounds = make_run("diloco", words).rounds()
    for _ in range(best + 2):
        next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    resumed = TrainingRun.resume(run)
    assert resumed.saving.newest == names[0] or every < 100
    list(resumed.rounds())
    assert kept(run) == kept(whole)

    capsys.readouterr()
    for words, name, loss in ((["--best"], names[0], min(losses)), ([], names[1], losses[-1])):
        assert main(["evaluate", str(run), *words]) == 0
        said = capsys.readouterr().out
        assert f"of {run / 'checkpoints' / name}\n" in said
        found = re.search(r"loss (\d+\.\d+)", said)
        assert found and float(found[1]) == pytest.approx(loss, abs=1e-4)
    of_best = adloco.load(run, best=True).model, adloco.load(run, round=best + 1).model
    for mine, other in zip(*(model.parameters() for model in of_best), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="give either best or a round, got best and round 2"):
        adloco.load(run, best=True, round=2)


def test_without_an_evaluated_checkpoint(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("single", [*small, "--run.rounds", "3", "--evaluation.every", "5"])
    next(run.rounds())
    run.saving.wait()
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--best"]) == 2
    assert "has no checkpoint of a round that was evaluated" in capsys.readouterr().err
