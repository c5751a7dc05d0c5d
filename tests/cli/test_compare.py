"""`adloco compare`: trains what is missing, compares on every axis, and refuses what is unfair."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import to_toml
from adloco.metrics import PHASE, ROUND, SYNC, TRAINER, WORKER
from adloco.run.folder import lock_held, locked


@pytest.fixture
def common(small: list[str], tmp_path: Path) -> list[str]:
    """Settings of all arms, and the study's folder."""
    return [*small, "--seeds", "1", "--run.tokens", "4096", "--run.folder", str(tmp_path / "study")]


def compared(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return content


def finished_run(folder: Path, val_loss: float | None = 4.0, **settings: str) -> str:
    """A folder as a run of `diloco` with one round leaves it, as far as a comparison needs it, with
    these settings (run__seed is run.seed). val_loss None: its evaluation was not finite.
    """
    folder.mkdir()
    flags = [(name.replace("__", "."), value) for name, value in settings.items()]
    (folder / "recipe.toml").write_text(
        to_toml(build_recipe(override(read_values("diloco"), flags)))
    )
    (folder / "summary.json").write_text("{}")
    counts = {
        "round": 1,
        "tokens": 100,
        "inner_steps": 4,
        "samples": 4,
        "syncs": 1,
        "bytes_sent": 8,
    }
    memory = {"evaluation": dict.fromkeys(PHASE, 0)}
    parts = {"sync": dict.fromkeys(SYNC, 0), "memory": memory, "merges": [], "changes": []}
    trainer = dict.fromkeys(TRAINER, 0) | {"val_loss": val_loss}
    parts |= {"trainers": [trainer], "workers": [dict.fromkeys(WORKER, 0)]}
    line = dict.fromkeys(ROUND, 0) | counts | {"seconds": 1.0, "val_loss": val_loss} | parts
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return str(folder)


@pytest.mark.usefixtures("warm_python")
def test_two_arms_from_training_to_the_page(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    words = ["compare", "diloco", "H2=diloco@--method.sync_every 2", *common]
    words += ["--parallel", "2", "--link", "8mbit", "--targets", "5,2.5,0.001"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Held equal: task, validation windows, model, data, tokenizer, 4,096 tokens" in out
    one = "method.sync_every (diloco: 4, H2: 2)"
    assert f"Differs: {one}. Fewer than 5 rounds: diloco; what syncs do shows later" in out
    content = compared(study)
    assert content["differs"] == [one]
    page = (study / "compare.html").read_text()
    assert f"Differs: {one}." in page
    # Numbers stay on a line; a folder may take several, so that its column is not cut.
    assert f'<td class="number">0</td><td>{study}' in page
    for arm, sync_every in zip(content["arms"], (4, 2), strict=True):
        (run,) = arm["runs"]
        rows = [
            json.loads(line)
            for line in Path(run["folder"], "metrics.jsonl").read_text().splitlines()
        ]
        assert len(rows) == 16 // sync_every
        assert run["axes"]["tokens"] == [row["tokens"] for row in rows]
        assert run["axes"]["sent"] == [row["bytes_sent"] for row in rows]
        assert run["measures"]["val_loss"] == [row["val_loss"] for row in rows]
        assert arm["final"]["val_loss"]["mean"] == rows[-1]["val_loss"]
        assert arm["to_target"]["2.5"]["tokens"]["count"] == 1
        # It was there before the first evaluation, and nobody knows since when.
        assert rows[0]["val_loss"] < 5 and arm["to_target"]["5"]["tokens"]["count"] == 0
        assert arm["to_target"]["0.001"]["tokens"]["mean"] is None
        # On a slow link each sync's bytes add to the time.
        slow, measured = run["axes"]["seconds on 8mbit"][-1], rows[-1]["seconds"]
        waited = sum(row["sync"]["exposed_seconds"] for row in rows)
        assert slow == pytest.approx(measured - waited + rows[-1]["bytes_sent"] / 1e6)
    finals = [arm["final"]["val_loss"]["mean"] for arm in content["arms"]]
    (difference,) = content["differences_of_final_loss"]
    assert difference["mean"] == finals[0] - finals[1] and difference["half_width"] is None

    table = list(csv.DictReader((study / "compare.csv").read_text().splitlines()))
    assert [(row["arm"], float(row["val_loss"])) for row in table] == [
        ("diloco", finals[0]),
        ("H2", finals[1]),
    ]
    assert table[0]["tokens_to_0.001"] == ""
    assert (study / "compare_loss.png").stat().st_size > 10_000
    page = (study / "compare.html").read_text()
    # In packed bytes any four letters occur now and then.
    packed = r'<script type="text/plain".*?</script>|base64,[A-Za-z0-9+/=]+'
    assert "http" not in re.sub(packed, "", page, flags=re.S)
    numbers = json.loads(re.search(r'class="chart-numbers">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [curve["name"] for curve in numbers["curves"]] == ["diloco", "H2"]
    assert "one seed: no claim" in page

    # Again: nothing is trained, and folders of the runs give the same comparison.
    before = {path: path.stat().st_mtime_ns for path in study.glob("runs/*/metrics.jsonl")}
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    folders = [arm["runs"][0]["folder"] for arm in content["arms"]]
    assert main(["compare", *folders, "--run.folder", str(tmp_path / "other")]) == 0
    again = compared(tmp_path / "other")
    assert [arm["name"] for arm in again["arms"]] == ["diloco", "diloco, method.sync_every 2"]
    assert [arm["final"]["val_loss"] for arm in again["arms"]] == [
        arm["final"]["val_loss"] for arm in content["arms"]
    ]

    # A number that was changed by hand is in no study that is shown again.
    (file, _) = before
    file.write_text(file.read_text().replace('"val_loss": ', '"val_loss": 1'))
    capsys.readouterr()
    assert main(words) == 2
    assert f"{file} is not what the run wrote: lines up to" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_python")
def test_a_study_that_was_stopped_resumes(common: list[str], tmp_path: Path) -> None:
    """Ctrl+C in the middle of the first run: it saves, and ends with what the other has, which is
    the same run and was never stopped.
    """
    other = "b=diloco@--run.checkpoint_every 9"
    words = ["compare", "diloco", other, *common, "--run.tokens", "8192"]
    study = subprocess.Popen(
        [sys.executable, "-m", "adloco", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "study"
    while not (found := list(folder.glob("runs/diloco*/metrics.jsonl"))):
        assert study.poll() is None, study.communicate()
        time.sleep(0.1)
    study.send_signal(signal.SIGINT)
    out, error = study.communicate(timeout=60)
    assert study.returncode == 130, error
    assert "stopped and saved; the same command continues" in out
    rounds = len(found[0].read_text().splitlines())
    assert 0 < rounds < 8 and not (found[0].parent / "summary.json").exists()
    assert main([*words, "--parallel", "2"]) == 0
    assert len(found[0].read_text().splitlines()) == 8
    stopped, whole = (arm["final"]["val_loss"]["mean"] for arm in compared(folder)["arms"])
    assert stopped == whole


@pytest.mark.usefixtures("warm_python")
def test_a_folder_has_one_study_at_a_time(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two at once called the runs failed that the other one trained, and their pages had
    half of the seeds each.
    """
    folder = tmp_path / "study"
    folder.mkdir()
    words = ["compare", "diloco", "b=diloco@--method.sync_every 2", *common, "--parallel", "2"]
    words += ["--run.tokens", "1024"]
    with lock_held(folder, "study"):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error == (
            f"adloco: study folder {str(folder)!r} is in use by another process; wait until it has "
            "ended, or end it\n"
        )
        assert not [*folder.glob("runs/*")]
    assert main(words) == 0
    with lock_held(folder, "study"):  # All runs have ended: they are only compared.
        assert main(words) == 0
    log = next(folder.glob("logs/*.log"))
    with log.open("w") as orphan:  # Of a run that a killed study left behind.
        shutil.rmtree(folder / "runs" / log.stem)
        assert main(words) == 0
        orphan.write("round 9\n")
    assert "round 9" not in log.read_text()


@pytest.mark.usefixtures("warm_python")
def test_a_run_that_another_process_trains_is_waited_for(
    common: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A study that was killed has left it behind; it ends while the next one waits."""
    words = ["compare", "diloco", "b=diloco@--method.sync_every 2", *common, "--run.tokens", "1024"]
    assert main(words) == 0
    run, _ = sorted((tmp_path / "study" / "runs").iterdir())
    summary, looks, sleep = (run / "summary.json").read_text(), list[float](), time.sleep
    with ExitStack() as other:
        other.enter_context(locked(run))
        (run / "summary.json").unlink()

        def ends_at_the_third(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                (run / "summary.json").write_text(summary)
                other.close()
            sleep(0)

        monkeypatch.setattr(time, "sleep", ends_at_the_third)
        capsys.readouterr()
        assert main(words) == 0
        out = capsys.readouterr().out
    assert out.count(": awaited: another process trains it, such as one that a killed study") == 1
    assert len(looks) >= 3 and len((run / "starts.jsonl").read_text().splitlines()) == 2


def test_a_run_that_another_process_begins_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study was killed just after it had started a process, and its line was given again at once:
    that process takes the folder before the one that the second study starts. A stub stands for the
    latter.
    """
    taken, refused = tmp_path / "taken", tmp_path / "refused"
    stub = tmp_path / "train"
    wait = f"while [ ! -e {taken} ]; do sleep 0.01; done"
    stub.write_text(f"#!/bin/sh\n{wait}\necho adloco: in use\ntouch {refused}\nexit 2\n")
    stub.chmod(0o755)
    study, sleep, looks = tmp_path / "study", time.sleep, list[float]()
    one = finished_run(tmp_path / "one")
    other = Path(finished_run(tmp_path / "other", method__sync_every="2"))
    with ExitStack() as lock:

        def look(seconds: float) -> None:
            (recipe,) = study.glob("recipes/*.toml")
            run = study / "runs" / recipe.stem
            if not taken.exists():
                shutil.copytree(other, run, ignore=shutil.ignore_patterns("summary.json"))
                lock.enter_context(locked(run))
                taken.touch()
            looks.extend([seconds] * refused.exists())
            if len(looks) == 20:
                shutil.copy(other / "summary.json", run)
                lock.close()
            sleep(0.02)

        monkeypatch.setattr(time, "sleep", look)
        monkeypatch.setattr(sys, "executable", str(stub))
        own = ["--run.folder", str(study), "--seeds", "1"]
        assert main(["compare", one, "b=diloco@--method.sync_every 2", *own]) == 0
    out = capsys.readouterr().out
    assert "b, seed 0: awaited: another process trains it" in out and "b, seed 0: done" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_was_told_to_end_before_it_could_answer_has_not_failed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stub that any signal ends stands for Python as it starts."""
    stub, sleep = tmp_path / "train", time.sleep
    stub.write_text("#!/bin/sh\nexec sleep 60\n")
    stub.chmod(0o755)

    def told(seconds: float) -> None:
        os.kill(os.getpid(), number)
        sleep(0.02)

    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setattr(time, "sleep", told)
    own = ["--run.folder", str(tmp_path / "study"), "--seeds", "1"]
    assert main(["compare", "b=diloco@--method.sync_every 2", "diloco", *own]) == 130
    out = capsys.readouterr().out
    assert "failed" not in out and "stopped and saved; the same command continues" in out


def test_a_run_that_fails_is_counted_and_gives_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stub that fails at once stands for `adloco train`; the other arm is a finished run."""
    stub = tmp_path / "train"
    stub.write_text("#!/bin/sh\necho adloco: broken\nexit 2\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    monkeypatch.setattr("adloco.study.training.POLL_SECONDS", 0.02)
    study = tmp_path / "study"
    own = ["--run.folder", str(study), "--seeds", "1"]
    assert main(["compare", "b=diloco@--method.sync_every 2", "diloco", *own]) == 1
    said = f"adloco: 2 of 2 runs failed; what they said is in {study / 'logs'}"
    assert capsys.readouterr().err == f"{said}, and there is nothing to compare\n"
    assert not (study / "compare.html").exists()

    assert main(["compare", finished_run(tmp_path / "run"), "b=diloco", *own]) == 1
    out, error = capsys.readouterr()
    assert "b, seed 0: failed" in out
    assert "lowest validation loss of one seed, which is no claim: diloco, 4.0000" in out
    assert error == f"adloco: 1 of 2 runs failed; what they said is in {study / 'logs'}\n"
    assert [arm["runs"][0]["problem"] for arm in compared(study)["arms"]] == ["", "broken"]
    assert "b, seed 0 failed: broken" in (study / "compare.html").read_text()

    # Killed, by the kernel for instance, after a line about a round.
    stub.write_text("#!/bin/sh\necho round 1\nkill -9 $$\n")
    assert main(["compare", str(tmp_path / "run"), "b=diloco", *own]) == 1
    killed = "failed after 0:00: it was ended by signal 9; the same command continues it\n"
    assert killed in capsys.readouterr().out


def test_a_run_whose_last_evaluation_is_not_finite_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = finished_run(tmp_path / "bad", None, run__seed="1")
    own = ["--run.folder", str(tmp_path / "study"), "--targets", "4"]
    assert main(["compare", finished_run(tmp_path / "good"), bad, *own]) == 1
    out, error = capsys.readouterr()
    assert "diloco, seed 1: failed: its last evaluation is not finite\n" in out
    assert error == "adloco: 1 of 2 runs failed\n"
    (arm,) = compared(tmp_path / "study")["arms"]
    for numbers in (arm["final"], arm["total"], arm["to_target"]["4"]):
        assert {number["count"] for number in numbers.values()} <= {0, 1}
    assert arm["total"]["tokens"]["count"] == 1


def test_a_run_without_rounds_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = finished_run(tmp_path / "lost", run__seed="1")
    file = Path(lost, "metrics.jsonl")
    text = file.read_text()
    file.write_text("")
    own = ["--run.folder", str(tmp_path / "study")]
    assert main(["compare", finished_run(tmp_path / "good"), lost, *own]) == 1
    out = capsys.readouterr().out
    assert f"diloco, seed 1: failed: {file} has no rounds\n" in out
    assert "; 1 seed of each arm." in out
    file.write_text(text)
    (tmp_path / "lost" / "summary.json").write_text('{"rounds": 2}')  # Its records have one.
    assert main(["compare", str(tmp_path / "good"), lost, *own]) == 1
    out = capsys.readouterr().out
    assert f"diloco, seed 1: failed: {file} has lost its last rounds\n" in out


def test_arms_without_a_common_seed_have_no_difference_and_are_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two recipes whose files have other seeds, each trained twice: 0 and 1, and 3 and 4."""
    runs = [
        finished_run(tmp_path / f"{name}{seed}", 2.0, run__name=name, run__seed=str(seed), **more)
        for name, first, more in (("a", 0, {}), ("b", 3, {"outer__lr": "0.5"}))
        for seed in (first, first + 1)
    ]
    assert main(["compare", *runs, "--run.folder", str(tmp_path / "study")]) == 0
    said = (
        "2 seeds of each arm. No seed is shared by a (0, 1) and b (3, 4), so no difference between "
        "them is shown; train all arms with the same run.seed.\n"
    )
    out = capsys.readouterr().out
    assert said in out and "Differences" not in out
    third = finished_run(tmp_path / "b1", 2.0, run__name="b", run__seed="1", outer__lr="0.5")
    assert main(["compare", *runs, third, "--run.folder", str(tmp_path / "more")]) == 0
    out = capsys.readouterr().out
    assert "No seed is shared" not in out and "Differences" in out


def test_one_seed_is_not_lower_than_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three seeds of an arm end at 2.0, 2.2 and 2.4, and the one seed of another at 2.15."""
    three = [
        finished_run(tmp_path / f"{seed}", loss, run__seed=str(seed))
        for seed, loss in enumerate((2.0, 2.2, 2.4))
    ]
    one = finished_run(tmp_path / "one", 2.15, run__name="one", outer__lr="0.5")
    assert main(["compare", *three, one, "--run.folder", str(tmp_path / "study")]) == 0
    assert "lowest validation" not in capsys.readouterr().out
    others = [
        finished_run(tmp_path / f"h{seed}", 2.3, run__seed=f"{seed}", outer__lr="0.6")
        for seed in range(3)
    ]
    more = str(tmp_path / "more")
    assert main(["compare", *three, one, *others, "--run.folder", more]) == 0
    said = "lowest validation loss of the arms with the most seeds: diloco, 2.2000\n"
    assert said in capsys.readouterr().out


@pytest.mark.nightly
def test_a_run_that_fails_is_named_and_the_others_compared(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explosive = "--inner.optimizer sgd --inner.lr 1e6 --method.max_grad_norm 0"
    words = [*common, "--run.tokens", "2048", "--learning_rate.warmup_fraction", "0"]
    assert main(["compare", "diloco", f"wild=diloco@{explosive}", *words, "--parallel", "2"]) == 1
    out = capsys.readouterr().out
    assert "wild, seed 0: failed" in out and "loss is" in out
    arms = compared(tmp_path / "study")["arms"]
    assert "loss is" in arms[1]["runs"][0]["problem"]
    assert arms[1]["final"]["val_loss"]["mean"] is None
    assert "wild, seed 0 failed" in (tmp_path / "study" / "compare.html").read_text()


def test_bad_input_is_one_sentence_and_leaves_nothing(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = "b=diloco@--method.sync_every 2"
    for words, message in [
        ([], "the following arguments are required: WHAT"),
        (["diloco"], "there is one run, and nothing to compare it with"),
        (["diloco", arm, "--link", "100"], "--link must be a bandwidth"),
        (
            ["diloco", arm, "--targets", "low"],
            "--targets: must be a number, got 'low'",
        ),
        (["diloco", arm, "--targets", "2,inf"], "--targets must be finite and > 0, got 2,inf"),
        (["diloco", arm, "--seeds", "0"], "--seeds must be >= 1, got 0"),
        (["diloco", arm, "--parallel", "0"], "--parallel must be >= 1, got 0"),
        (["diloco", "b=diloco@--model.num_layers 2"], "the arms differ in model"),
        (["diloco", str(tmp_path)], "is neither a recipe nor a run folder"),
        (
            ["diloco", "b=diloco@--method.sync_every 3", "--run.tokens", "512"],
            "the budget ends after 2 inner steps, within the first round of method.sync_every = ",
        ),
    ]:
        assert main(["compare", *common, *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "study").exists()


@pytest.mark.nightly
def test_a_budget_in_inner_steps(common: list[str], tmp_path: Path) -> None:
    constant = ["--learning_rate.shape", "constant"]
    words = ["compare", "diloco", "b=diloco@--method.sync_every 8", *common, *constant]
    until = ["--run.tokens", "0", "--run.inner_steps", "8"]
    assert main([*words, *until, "--parallel", "2"]) == 0
    content = compared(tmp_path / "study")
    assert [arm["total"]["inner_steps"]["mean"] for arm in content["arms"]] == [8, 8]
    assert [arm["total"]["syncs"]["mean"] for arm in content["arms"]] == [2, 1]
    assert "8 inner steps" in content["held_equal"]


@pytest.mark.nightly
def test_unequal_arms_are_compared_by_force_and_marked(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "diloco", "wide=diloco@--model.hidden_size 64", *common, "--force"]
    assert main([*words, "--run.tokens", "1024", "--parallel", "2"]) == 0
    mark = "NOT HELD EQUAL: model (model.hidden_size: diloco: 32, wide: 64)"
    assert mark in " ".join(capsys.readouterr().out.split())
    assert compared(tmp_path / "study")["not_held_equal"] == [
        "model (model.hidden_size: diloco: 32, wide: 64)"
    ]
    # In the warning, in the caption of the curves, and above every table.
    assert (tmp_path / "study" / "compare.html").read_text().count(mark) == 5
