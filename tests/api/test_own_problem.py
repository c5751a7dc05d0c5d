"""`adloco.train(problem=...)`: a model, data and loss of one's own, in a run folder like others."""

import errno
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import adloco
from adloco.cli.main import main
from adloco.errors import NonFiniteLossError
from adloco.metrics import Record
from adloco.run import part_file, records
from tests.api.test_train_function import at_step
from tests.problems import squared_error

X = torch.randn(96, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5])
WORKERS = "method.workers_per_trainer"
VALIDATION = [(X[:20], Y[:20]), (X[20:32], Y[20:32]), (X[32:34], Y[32:34])]


def a_problem(**changes: Any) -> adloco.Problem:
    """Linear regression."""
    told: dict[str, Any] = {
        "build_model": lambda: nn.Linear(3, 1),
        "loss_fn": squared_error,
        "data": adloco.TensorSource(X[34:], Y[34:], num_streams=4),
        "validation": VALIDATION,
    }
    return adloco.Problem(**told | changes)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run of two rounds."""
    return {
        "folder": tmp_path / "run",
        "tokens": 16 * 5 * 2,
        "run.trackers": "none",
        "method.sync_every": 5,
        "batch.initial": 16,
        "run.threads": 1,
        "learning_rate.shape": "constant",
        "run.precision": "fp32",  # As the oracle computes; auto is bf16 on some machines.
    }


def train_losses(records: list[Record]) -> list[float]:
    return [record["train_loss"] for record in records]


def test_it_trains_what_adloco_trains_and_evaluates_its_batches(settings: dict[str, Any]) -> None:
    """An evaluation, and the check before the run, leave running statistics as they are."""
    problem = a_problem(build_model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    run = adloco.train("diloco", problem=problem, **settings)
    recipe = run.recipe
    torch.manual_seed(0)
    oracle = adloco.AdLoCo(
        problem,
        recipe.method,
        inner=recipe.inner,
        syncing=recipe.syncing,
        batching=recipe.batching,
        learning_rate=recipe.learning_rate,
        placement=adloco.OneProcess(threads=1),
    )
    reports = list(oracle.rounds(2))
    oracle.load_global()
    assert train_losses(run.records) == [report.train_loss for report in reports]
    (notice,) = json.loads((run.folder / "environment.json").read_text())["notices"]
    assert "has 4 streams and the run has 2 workers, so 2 of them are never read" in notice
    assert [record["tokens"] for record in run.records] == [80, 160]
    model = oracle.model(0).eval()
    expected = [float(squared_error(model, batch).detach()) for batch in VALIDATION]
    assert run.records[-1]["val_loss"] == pytest.approx(sum(expected) / 3)
    assert run.evaluate() == {"loss": pytest.approx(sum(expected) / 3)}
    for mine, its in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_workers_share_the_batches_of_an_evaluation(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three batches over four workers: each batch counts once."""
    run = adloco.train("diloco", problem=a_problem(), **settings, **{WORKERS: 4})
    assert "epochs" not in capsys.readouterr().out, "nobody knows how many samples a source has"
    losses = [float(squared_error(run.model, batch).detach()) for batch in VALIDATION]
    assert run.records[-1]["val_loss"] == pytest.approx(sum(losses) / 3)


def test_it_resumes_bit_for_bit_and_its_folder_is_read_by_the_commands(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = adloco.train("diloco", problem=a_problem(), **settings | {"folder": tmp_path / "whole"})
    with (
        at_step(8, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt) as stopped,
    ):
        adloco.train("diloco", problem=a_problem(), **settings)
    again = f"adloco.train(resume='{settings['folder']}', problem=problem)"
    assert str(stopped.value) == f"saved; resume with {again}"
    assert f"stopped and saved; resume with: {again}\n" in capsys.readouterr().out
    run = adloco.train(resume=settings["folder"], problem=a_problem())
    assert train_losses(run.records) == train_losses(whole.records)
    capsys.readouterr()

    folder = str(run.folder)
    assert main(["report", folder]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("finished") == 2
    for command in (["evaluate", folder], ["train", "--resume", folder, "--run.tokens", "640"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "in the Python script that began it; use adloco.train(resume=RUN" in error


def test_a_failed_run_says_the_call_that_resumes_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`adloco train --resume` has no problem, and would refuse."""
    again = f"adloco.train(resume='{settings['folder']}', problem=problem)"

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_later(tensors: Any, path: Path) -> None:
        begun = path.parent.name.startswith("round-000000")
        save_tensors(tensors, path) if begun else full()

    save_tensors = part_file.save_tensors
    with monkeypatch.context() as later:
        later.setattr(part_file, "save_tensors", full_later)
        with pytest.raises(ValueError, match=re.escape(f"00000000 with: {again}")):
            adloco.train("diloco", problem=a_problem(), **settings)
    with monkeypatch.context() as later:
        later.setattr(records, "to_disk", full)
        with pytest.raises(ValueError, match=re.escape(f"then resume with: {again}")):
            adloco.train(resume=settings["folder"], problem=a_problem())
    settings |= {"inner.lr": 1e30, "folder": tmp_path / "nan"}
    again = again.replace("/run'", "/nan'")
    with pytest.raises(
        NonFiniteLossError, match=re.escape(f"; {again} continues from there, with a")
    ):
        adloco.train("diloco", problem=a_problem(), **settings)


@pytest.mark.nightly
def test_runs_of_a_problem_are_compared(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        folders.append(str(tmp_path / f"seed-{seed}"))
        given = settings | {"folder": folders[-1], "seed": seed}
        adloco.train("diloco", problem=a_problem(), **given)
    assert main(["compare", *folders, "--run.folder", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / "compare.html").exists()


def test_the_random_numbers_of_the_caller_go_on(settings: dict[str, Any]) -> None:
    """A test set that is drawn after training is not the training set that was drawn before."""
    torch.manual_seed(settings.setdefault("seed", 3))
    before = torch.randn(4)
    adloco.train("diloco", problem=a_problem(), **settings)
    after = torch.randn(4)
    torch.manual_seed(settings["seed"])
    assert torch.equal(torch.cat([before, after]), torch.cat([torch.randn(4), torch.randn(4)]))


def test_a_run_within_another_one_is_refused(settings: dict[str, Any]) -> None:
    """As one in another thread is: both would seed the random numbers of the process."""

    def trains(model: Any, batch: Any) -> torch.Tensor:
        adloco.train("diloco", problem=a_problem(), **settings)
        return squared_error(model, batch)

    with pytest.raises(ValueError, match=r"^another adloco\.train trains in this process"):
        adloco.train("diloco", problem=a_problem(loss_fn=trains), **settings)
    assert not settings["folder"].exists()
    adloco.train("diloco", problem=a_problem(), **settings)


def test_what_does_not_fit_is_refused(settings: dict[str, Any]) -> None:
    model = nn.Linear(3, 1)
    for made, message in (
        (model, "give a new model at"),
        ((model, 1), "return a model, got <.*tu"),
    ):
        with pytest.raises(ValueError, match=f"^build_model must {message}"):
            adloco.train("diloco", problem=a_problem(build_model=lambda m=made: m), **settings)
    with pytest.raises(ValueError, match=r"^problem must be a Problem, got <.*Linear"):
        adloco.train("diloco", problem=model, **settings)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"AttributeError: .*\); correct its sizes, or the code of a"
    ):
        adloco.train("diloco", problem=a_problem(loss_fn=nn.MSELoss()), **settings)
    for empty in ((), iter(VALIDATION)):
        with pytest.raises(ValueError, match=r"problem\.validation must be a list with at least"):
            adloco.train("diloco", problem=a_problem(validation=empty), **settings)
    with pytest.raises(ValueError, match="gives nan for the first validation batch"):
        nan = [(X[:2], torch.full((2,), math.nan))]
        adloco.train("diloco", problem=a_problem(validation=nan), **settings)
    for loss, kind in (
        (lambda model, batch: batch[1], r"a tensor of shape \[20\]"),
        (print, "NoneT"),
    ):
        with pytest.raises(
            ValueError, match=f"^loss_fn must return the mean loss of .* got {kind}"
        ):
            adloco.train("diloco", problem=a_problem(loss_fn=loss), **settings)
    with pytest.raises(
        ValueError, match="^a model has no values in weight, bias: build it outside of torch"
    ):
        meta = a_problem(build_model=lambda: nn.Linear(3, 1, device="meta"))
        adloco.train("diloco", problem=meta, **settings)
    with pytest.raises(ValueError, match="data needs num_streams >= 6 .*, got 4"):
        adloco.train("diloco", problem=a_problem(), **settings, **{WORKERS: 6})
    with pytest.raises(ValueError, match=r"^model\.dtype and model\.gradient_checkpointing do not"):
        adloco.train("diloco", problem=a_problem(), **settings | {"model.dtype": "bf16"})
    with pytest.raises(ValueError, match="^a problem has its own data; leave out data"):
        adloco.train("diloco", problem=a_problem(), data="text.txt", **settings)
    assert not settings["folder"].exists()

    run = adloco.train("diloco", problem=a_problem(), **settings)
    wider = a_problem(build_model=lambda: nn.Linear(3, 2))
    with pytest.raises(ValueError, match="another model than that of the run in"):
        _ = adloco.load(run.folder, problem=wider).model
    with pytest.raises(ValueError, match=r"use .*adloco\.load\(RUN, problem=\.\.\.\) there"):
        _ = adloco.load(run.folder).model
    other = a_problem(data=adloco.TensorSource(X[:62], Y[:62], num_streams=4))
    with pytest.raises(ValueError, match="is not what the run in .* began with"):
        adloco.train(resume=run.folder, problem=other)


def test_a_run_of_text_has_its_own_model_and_longer_samples(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "diloco", *small, "--data.context_tokens", "1"]) == 2
    assert "data.context_tokens must be >= 2, got 1" in capsys.readouterr().err
    assert main(["train", "diloco", *small, "--run.rounds", "1"]) == 0
    with pytest.raises(ValueError, match="from its recipe; leave out problem"):
        _ = adloco.load(tmp_path / "run", problem=a_problem()).model


class TurnedTargets:
    """The workers of the third of three islands have targets of the other sign."""

    num_streams = 6

    def read(self, stream: int, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(position, position + count) * 6 + stream
        return X[rows % 96], Y[rows % 96] * (1 if stream < 4 else -1)


def test_islands_are_those_of_the_problem(settings: dict[str, Any]) -> None:
    """A gate compares the workers of an island with one another alone, here two by two; over all
    six it leaves out one of the two that differ.
    """
    pytest.importorskip("adloco.lab.gate")
    settings |= {WORKERS: 6, "tokens": 48 * 5, "batch.initial": 48, "outer.gate": True}
    settings |= {"inner.optimizer": "adamw", "inner.lr": 1e-2, "outer.update": "mean"}
    left_out = []
    for islands in (1, 3):
        folder = settings["folder"].with_name(f"islands-{islands}")
        problem = a_problem(data=TurnedTargets(), islands=islands)
        run = adloco.train("diloco", problem=problem, **settings | {"folder": folder})
        left_out.append([each["syncs_left_out"] for each in run.records[0]["workers"]])
        of_rounds = [each["syncs_left_out"] for line in run.records for each in line["workers"]]
        assert run.summary["syncs_left_out"] == sum(of_rounds)
    assert left_out == [[0, 0, 0, 0, 0, 1], [0] * 6]


def test_frozen_parameters_that_are_drawn_anew_are_refused(settings: dict[str, Any]) -> None:
    numbers = np.random.default_rng(0)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        drawn = torch.as_tensor(numbers.normal(size=(3, 3)))
        model[0].weight.data.copy_(drawn)  # type: ignore[union-attr, operator]
        return model

    problem = a_problem(build_model=build)
    run = adloco.train("diloco", problem=problem, **settings)
    for again in (lambda: run.model, lambda: adloco.train(resume=run.folder, problem=problem)):
        with pytest.raises(ValueError, match="^the frozen parameter or buffer 0.weight of the"):
            again()
