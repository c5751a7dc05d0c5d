"""`adloco train --restart`: one command that begins a run, or resumes it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adloco.cli.alerts import Alerts
from adloco.cli.main import main
from adloco.cli.rank_processes import Machines
from adloco.cli.train import RESTARTS, Train, _FailureCount
from adloco.cli.train_here import _Process
from adloco.cli.training_loop import Training
from adloco.config.setting_words import take_settings
from adloco.config.settings import RunSettings
from adloco.distributed.launch.rank_store import Quorum
from adloco.errors import RANK_FAILURE, RankFailureError, exit_code
from adloco.run.records import Records
from adloco.run.recovery import LostPartsError
from adloco.run.starts import read_starts
from tests.conftest import WaitForSteps
from tests.pages import NEEDS_ELASTIC
from tests.problems import numbers_of
from tests.run.test_training_run import make_run

ADLOCO = [sys.executable, "-m", "adloco"]


def test_it_begins_a_run_resumes_it_and_ends_with_it(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "run"
    assert main(["train", "diloco", *small, "--run.folder", str(whole), "--restart"]) == 0
    rounds = make_run("diloco", [*small, "--run.checkpoint_every", "2"]).rounds()
    for _ in range(3):  # One more than the checkpoint has.
        next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    again = ["train", "diloco", *small, "--restart", "--run.checkpoint_every", "3"]
    assert main(again) == 0
    assert numbers_of(parts) == numbers_of(whole)
    capsys.readouterr()
    assert main(again) == 0
    assert "has spent its budget already" in capsys.readouterr().out
    assert numbers_of(parts) == numbers_of(whole)


def test_no_more_ranks_start_again_than_the_workers_that_are_left_need(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is still the one with which the run began, before workers were dropped."""
    started = list[int]()
    monkeypatch.setattr(
        "adloco.cli.rank_processes.start_ranks", lambda count, *_: started.append(count) or 0
    )
    line = ["train", "diloco", *small, "--method.workers_per_trainer", "3", "--restart"]
    assert main([*line, "--run.rounds", "1"]) == 0
    folder = Path(small[small.index("--run.folder") + 1])
    for rounds, dropped in (("2", "[1]"), ("3", "[0, 1]")):
        again = ["--run.rounds", rounds, "--method.dropped", dropped]
        assert main(["train", "--resume", str(folder), *again]) == 0
        assert main([*line, "--ranks", "3", "--run.rounds", "4"]) == 0
    assert started == [2], "the last worker trains without ranks"
    assert [line["trainers"][0]["workers"] for line in Records(folder).read()] == [3, 2, 1, 1]


def test_ranks_that_torchrun_starts_again_begin_no_other_run(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--max-restarts repeats the line, which without a folder would train from the beginning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    at = small.index("--run.folder")
    nameless = [*small[:at], *small[at + 2 :], "--run.rounds", "1"]
    assert main(["train", "diloco", *nameless]) == 2
    assert "without --restart and --run.folder they would begin an" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    rounds = make_run("diloco", small).rounds()  # None has begun in that folder.
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    notify = ["--notify", f"tee -a {tmp_path / 'said'}"]
    assert main(["train", "diloco", *small, "--restart", *notify]) == 0
    assert "has recovered: torchrun has started the ranks again" in (tmp_path / "said").read_text()


def test_a_longer_budget_is_not_another_recipe(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the schedule follows from the budget, and the part that is its warm-up."""
    wsd = ["--learning_rate.shape", "wsd", "--learning_rate.warmup_fraction", "0.02"]
    words = ["train", "diloco", *small, *wsd, "--restart", "--run.tokens"]
    rounds = make_run("diloco", [*small, *wsd, "--run.tokens", "4096"]).rounds()
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    for _ in range(2):
        assert main([*words, "8192"]) == 0
    assert numbers_of(tmp_path / "run")[-1]["tokens"] == 8192
    capsys.readouterr()
    warmup = ["--learning_rate.warmup_fraction", "0.001"]
    other = ["--learning_rate.total_tokens", "9999"]
    for changed, name in ((other, "total_tokens (8192"), (warmup, "warmup_fraction (0.01 there")):
        assert main([*words, "8192", *changed]) == 2
        assert f"by learning_rate.{name}" in capsys.readouterr().err


def test_values_that_the_recipe_file_has_since_are_named(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run keeps those that it has; one on the line is taken."""
    file, folder = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text("[inner]\nlr = 0.001\n[run]\nkeep_checkpoints = 3\nprecision = 'auto'\n")
    words = ["train", str(file), *small, "--run.rounds", "1", "--restart"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "--restart" not in capsys.readouterr().out
    file.write_text("[inner]\nlr = 0.0001\n[run]\nkeep_checkpoints = 2\nprecision = 'auto'\n")
    sentence = (
        "the run keeps inner.lr 0.001 (0.0001 in the recipe), because --restart changes only what "
        "is on the line; give there what is to change"
    )
    again = [*words, "--run.keep_checkpoints", "4", "--run.rounds", "2"]
    assert main(again) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert not (folder / "changes.jsonl").exists()
    assert main([*again, "--run.rounds", "3", "--inner.lr", "0.0001"]) == 0
    assert "--restart" not in capsys.readouterr().out


@NEEDS_ELASTIC
def test_a_machine_that_comes_after_the_end_waits_for_nobody(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer budget, or a report that was not written, makes it meet the others."""

    def meet(*_: Any) -> None:
        raise RankFailureError("it has met")

    monkeypatch.setattr(Machines, "rendezvous", meet)
    words = ["train", "diloco", *small, "--restart"]
    machine = [*words, "--machines", "2", "--meet", "127.0.0.1:29400"]
    assert main(machine) == RANK_FAILURE
    assert main(words) == 0
    capsys.readouterr()
    assert main(machine) == 0
    folder = Path(small[small.index("--run.folder") + 1])
    assert capsys.readouterr().out == f"the run in {folder} is complete\n"
    longer = ["--run.tokens", "16000", "--learning_rate.total_tokens", "8000"]
    assert main([*machine, *longer]) == RANK_FAILURE
    (folder / "summary.json").unlink()
    assert main(machine) == RANK_FAILURE
    assert capsys.readouterr().err == "adloco: it has met\n" * 2


def test_refusals(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "diloco", *small]) == 0
    for words, message in (
        (["diloco", *small, "--method.sync_growth", "1"], "method.sync_growth (0.0 there, 1"),
        (["ddp", *small], "has a run of another recipe, by"),
        (["diloco"], "needs its folder: give --run.folder too"),
        (["--resume", str(tmp_path / "run")], "leave out --resume"),
    ):
        capsys.readouterr()
        assert main(["train", *words, "--restart"]) == 2
        assert message in capsys.readouterr().err


def test_a_machine_without_records_counts_its_checkpoints(tmp_path: Path) -> None:
    """It has failed five times, and trained a round in between."""
    failures = _FailureCount(tmp_path)
    assert [failures.one_more() for _ in range(RESTARTS)] == [True] * RESTARTS
    (tmp_path / "checkpoints" / "round-000001-step-00000004").mkdir(parents=True)
    assert [failures.one_more() for _ in range(RESTARTS + 1)] == [True] * RESTARTS + [False]


def test_a_machine_that_takes_its_parts_along_is_waited_for(
    small: list[str], tmp_path: Path
) -> None:
    """The others end as after a failure, which schedulers start again; not as for bad input."""
    rounds = make_run("diloco", [*small, "--run.on_rank_failure", "replace"]).rounds()
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    folder = tmp_path / "run"
    for file in folder.glob("checkpoints/*/worker-1.*"):
        file.unlink()
    settings = RunSettings(on_rank_failure="replace")
    for number, kind, code in ((0, LostPartsError, 2), (1, RankFailureError, RANK_FAILURE)):
        quorum = Quorum(number=number, members=(0,), process=0)
        regrouping = SimpleNamespace(quorum=quorum, recovers=True)
        process = _Process(Train(words=[], settings=[]), settings, Alerts(), regrouping)  # type: ignore[arg-type]
        with pytest.raises(kind, match="worker-1 is missing") as error:
            process.resume(folder, [], "regroup")
        assert exit_code(error.value) == code
        assert regrouping.recovers == (number == 0), "they do not meet for it again and again"


def test_a_rank_told_to_end_after_the_failure_of_another_says_which_one_it_was(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun tells it while it still finds that out."""

    @contextmanager
    def finds_out(*_: object, **__: object) -> Iterator[None]:
        with pytest.raises(RuntimeError, match="connection closed"):
            yield
        os.kill(os.getpid(), signal.SIGTERM)
        raise RankFailureError("rank 1 is gone")

    def closed(self: Training, settings: object) -> int:
        raise RuntimeError("connection closed")

    monkeypatch.setattr("adloco.cli.train_here.process_group", finds_out)
    monkeypatch.setattr(Training, "train", closed)
    line = Train(words=[], recipe="diloco", settings=take_settings(small)[0])
    process = _Process(line, RunSettings(), Alerts())
    with pytest.raises(RankFailureError, match=r"rank 1 is gone; resume with: adloco train"):
        process.train()


@pytest.mark.nightly
def test_ranks_start_again_each_time_that_one_is_killed(
    small: list[str], tmp_path: Path, wait_for_steps: WaitForSteps
) -> None:
    """More often than without a round in between, and with the numbers of a run left alone."""
    words = ["train", "adloco", *small, "--ranks", "2", "--run.checkpoint_every", "1", "--restart"]
    assert main([*words, "--run.folder", str(tmp_path / "whole")]) == 0
    for mark in (tmp_path / "hook").glob("stepped-*"):
        mark.unlink()
    process = subprocess.Popen([*ADLOCO, *words], stderr=subprocess.PIPE, text=True)
    for _ in range(RESTARTS + 1):
        wait_for_steps(2)
        for mark in (tmp_path / "hook").glob("stepped-*"):
            mark.unlink()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    assert error.count("because a rank failed") == RESTARTS + 1
    starts = read_starts(tmp_path / "run")
    assert [start.failed for start in starts if start.kind == "resume"] == [True] * (RESTARTS + 1)
    elapsed, counted = starts[-1].time - starts[0].time, starts[-1].seconds
    assert sum(start.seconds_lost for start in starts) == pytest.approx(elapsed - counted, abs=0.1)
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
