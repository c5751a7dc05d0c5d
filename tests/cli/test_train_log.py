"""train.log: what it says of a run from its start to its end, and that it stays plain text."""

import io
import itertools
import logging
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from adloco.cli.live_view import LiveView
from adloco.cli.main import main
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import Training
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.rules.failure_signs import all_signs
from adloco.run.training_run import TrainingRun

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO   |WARNING|ERROR  ) (\S.*)")


def said(folder: Path) -> list[str]:
    """The messages in train.log, after a check that every line is a dated one."""
    lines = (folder / "train.log").read_text().splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    return [match[1].strip() + " " + match[2] for match in matches if match]


def position(lines: list[str], start: str) -> int:
    """The number of the only line that begins with this."""
    (found,) = [number for number, line in enumerate(lines) if line.startswith(start)]
    return found


def test_the_log_of_a_run_that_was_stopped_and_resumed(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small, "--merge.first_round", "2", "--run.tokens", "4000", "--batch.maximum", "4"]
    settings, _ = take_settings(words)
    run = TrainingRun.create(build_recipe(override(read_values("adloco"), settings)))
    folder = tmp_path / "run"
    console = Console(force_terminal=True, width=100)
    passes = itertools.count(1)
    run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: os.kill(os.getpid(), signal.SIGINT) if next(passes) == 40 else None
    )
    given = [("inner.lr", "1e-3")]
    with train_log(run) as log:
        code = Training(run=run, console=console, log=log).train(given)
    assert code == 130
    first = said(folder)
    assert first[0].startswith("INFO adloco 0.1.0 trains adloco in ")
    assert first[0].endswith("run, 0 / 4,000 tokens done")
    assert "INFO setting on the line: inner.lr = 1e-3" in first
    assert position(first, "INFO checkpoint round-000000-step-00000000") < position(
        first, "INFO round    1 "
    )
    assert position(first, "INFO round    2 ") < position(
        first, "INFO round 2: trainer 1 merged into trainer 0, weights 0: 0.50, 1: 0.50"
    )
    assert position(first, "INFO round 1: validation, trainer 0 ")
    assert first[-3] == "WARNING told to stop by SIGINT"
    assert first[-2].startswith("INFO checkpoint round-00000")
    assert first[-1] == f"INFO stopped and saved; resume with: adloco train --resume {folder}"

    # No checkpoint takes as little as this.
    assert main(["train", "--resume", str(folder), "--run.grace_seconds", "1e-9"]) == 0
    lines = said(folder)
    assert lines[: len(first)] == first
    second = lines[len(first) :]
    assert second[0].startswith("INFO adloco 0.1.0 resumes adloco in ")
    ended = int(first[-2].split("round-")[1][:6])
    assert f"; continues in round {ended + 1}" in second[2]
    assert second[3].endswith(" 1 trainer of 2 workers; on cpu (2 cores)"), "they have merged"
    late = "WARNING the last checkpoint took 0 s, longer than run.grace_"
    assert position(second, late) == 7
    assert sum("the last checkpoint took" in line for line in lines) == 1
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.removeprefix("INFO ") for line in second[-7:]] == printed[-7:]
    rounds = [line for line in lines if line.startswith("INFO round ") and " tok/s" in line]
    assert len(rounds) == len(run.records.read())


def test_the_error_that_ends_a_run_is_logged(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "diloco", *small, "--inner.lr", "1e30"]) == 2
    lines = said(tmp_path / "run")
    error = capsys.readouterr().err.splitlines()[-1]
    assert lines[-1] == f"ERROR NonFiniteLossError: {error.removeprefix('adloco: ')}"
    assert "the last good checkpoint is" in lines[-1]


def test_tasks_that_srun_started_are_not_ranks(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert main(["train", "diloco", *small]) == 0
    said = capsys.readouterr().out
    assert said.startswith("srun started 4 tasks, and each that has this command trains the whole")


def test_every_message_is_one_line_of_plain_text(small: list[str], tmp_path: Path) -> None:
    """And the logging of a program around the run is as it was, with the level that it had."""
    settings, _ = take_settings(small)
    run = TrainingRun.create(build_recipe(override(read_values("single"), settings)))
    logger = logging.getLogger("adloco")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with pytest.raises(KeyboardInterrupt), train_log(run):
        logging.getLogger("adloco.anything").warning("%s", "two\nlines \x1b[31min red")
        raise KeyboardInterrupt
    assert said(tmp_path / "run") == [
        "WARNING two lines in red",
        "ERROR interrupted; what was trained since the newest checkpoint is lost",
    ]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_request_that_explodes_is_warned_of_everywhere(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With eta = 0.05, the norm test asks for 400 times the noise scale at once."""
    unguarded = ["--batch.eta", "0.05", "--batch.max_growth", "1000"]
    words = [*small, *unguarded, "--batch.maximum", "160", "--run.tokens", "3000"]
    assert main(["train", "ddp-norm", *words]) == 0
    seen = "request exploding since round 1: the request of trainer 0 rose from 8 to 160 samples"
    printed = [line for line in capsys.readouterr().out.splitlines() if "exploding" in line]
    assert len(printed) == 1
    assert printed[0].strip().startswith(f"warning: {seen}")
    logged = [line for line in said(tmp_path / "run") if "exploding" in line]
    assert len(logged) == 1
    assert logged[0].startswith(f"WARNING {seen}")
    page = (tmp_path / "run" / "report.html").read_text()
    shown = "the request of trainer 0 rose from 8 to 160 samples between rounds 1 and 2."
    assert f"request exploding since round 1</span>: {shown}" in page
    # A resumed run shows in its live view what was warned of before.
    run = TrainingRun.resume(tmp_path / "run")
    view = LiveView(run, all_signs(run.records.read(), run.recipe.batch_cap))
    for width in (60, 100):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(view.render())
        text = " ".join(console.export_text().replace("│", " ").split())
        assert f"warning: {seen}" in text
        assert "Set batch.max_growth to 2" in text


def test_a_time_that_is_longer_than_its_limit_is_said_once(
    monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    limits = ["--run.grace_seconds", "30", "--run.timeout_seconds", "60"]
    settings, _ = take_settings([*small, *limits])
    run = TrainingRun.create(build_recipe(override(read_values("single"), settings)))
    monkeypatch.setattr(run, "placement", SimpleNamespace(num_ranks=2))
    out = io.StringIO()
    training = Training(run=run, console=Console(file=out), log=logging.getLogger("limits"))
    for of_checkpoint, of_round in [(30.0, 60.0), (45.2, 61.0), (99.0, 99.0)]:
        run.saving.seconds = of_checkpoint
        training.check_times(of_round)
    checkpoint, rounds = out.getvalue().splitlines()
    assert "last checkpoint took 45 s, longer than run.grace_seconds = 30: " in checkpoint
    assert "checkpoint of this run took 61 s, longer than run.timeout_seconds = 60: " in rounds
    assert rounds.endswith("set it to 122 or more")
