"""`adloco sweep`, `adloco ablate` and `adloco runs` on small runs."""

import json
import shutil
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.run.folder import ENVIRONMENT
from adloco.study.arms import StudyRun


@pytest.fixture
def common(small: list[str], tmp_path: Path) -> list[str]:
    """Settings of all runs, and the study's folder."""
    folder = ["--run.folder", str(tmp_path / "study"), "--parallel", "2"]
    return [*small, "--seeds", "1", "--run.tokens", "2048", *folder]


@pytest.mark.usefixtures("warm_python")
def test_one_axis(common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "diloco", *common, "--method.sync_every", "4", "9"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "lowest validation loss of one seed, which is no claim: sync_every" in out
    # 2,048 tokens are 8 inner steps, so every H from 9 on is the same run.
    notice = "sync_every 9: the budget ends after 8 inner steps, within the first round"
    assert notice in out.partition("lowest validation loss")[0]
    assert out.count(notice) == 1
    assert "sync_every 4: the budget" not in out
    assert (tmp_path / "study" / "sweep_method.sync_every.png").stat().st_size > 5_000
    assert (tmp_path / "study" / "compare.html").read_text().count('<img class="figure"') == 1
    (short,) = (
        recipe.parent
        for recipe in (tmp_path / "study").glob("runs/*/recipe.toml")
        if "sync_every = 9\n" in recipe.read_text()
    )
    shutil.rmtree(short)  # As if it had been interrupted: the same command continues.
    assert main(["sweep", "diloco", *common, "--method.sync_every", "4", "9"]) == 0


def test_a_sweep_whose_runs_have_begun_continues(
    common: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type that `auto` has taken makes it no twin of the other, or the command is refused."""

    def begin(runs: list[StudyRun], *_: object, **__: object) -> int:
        for run in runs:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / ENVIRONMENT).write_text('{"precision": "fp32"}')
        return 0

    monkeypatch.setattr("adloco.cli.studies.run_study", begin)
    for _ in range(2):
        assert main(["sweep", "diloco", *common, "--run.precision", "auto", "fp32"]) == 0


@pytest.mark.usefixtures("warm_python")
def test_threads_that_are_given_stay(common: list[str], tmp_path: Path) -> None:
    """Both runs had those of a half of the cores, whatever their names said."""
    words = ["sweep", "diloco", *common, "--method.sync_every", "4", "--run.tokens", "1024"]
    assert main([*words, "--run.threads", "1", "3"]) == 0
    for threads in (1, 3):
        (recipe,) = (tmp_path / "study" / "runs").glob(f"threads-{threads}-*/recipe.toml")
        assert f"\nthreads = {threads}\n" in recipe.read_text()


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
def test_a_grid_of_four(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    axes = ["--method.sync_every", "2", "4", "--inner.lr", "1e-3", "1e-2"]
    assert main(["sweep", "diloco", *common, *axes]) == 0
    out = " ".join(capsys.readouterr().out.split())
    content = json.loads((study / "compare.json").read_text())
    finals = {arm["name"]: arm["final"]["val_loss"]["mean"] for arm in content["arms"]}
    assert list(finals) == [
        "sync_every 2, lr 1e-3", "sync_every 2, lr 1e-2",
        "sync_every 4, lr 1e-3", "sync_every 4, lr 1e-2",
    ]  # fmt: skip
    best = min(finals, key=lambda arm: finals[arm])
    said = "lowest validation loss of one seed, which is no claim"
    assert f"{said}: {best}, {finals[best]:.4f}" in out
    for name in ("method.sync_every", "inner.lr"):
        assert (study / f"sweep_{name}.png").stat().st_size > 5_000
    assert (study / "compare.html").read_text().count('<img class="figure"') == 2

    assert main(["runs", str(study)]) == 0
    listed = capsys.readouterr().out
    assert listed.count("finished") == 4 and listed.count("2,048") == 4


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
def test_an_ablation_of_the_default_recipe(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*common, "--merge.first_round", "1", "--merge.every", "1"]
    assert main(["ablate", "adloco", "--without", "merging", *words]) == 0
    content = json.loads((tmp_path / "study" / "compare.json").read_text())
    assert [arm["name"] for arm in content["arms"]] == ["adloco", "without merging"]
    merges = [
        sum(len(json.loads(line)["merges"]) for line in lines)
        for arm in content["arms"]
        for lines in [Path(arm["runs"][0]["folder"], "metrics.jsonl").read_text().splitlines()]
    ]
    assert merges[0] > 0 and merges[1] == 0


def test_bad_input(
    common: list[str], small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in [
        (["sweep", "diloco", *common], "a sweep needs a setting with several values"),
        (["sweep", "diloco", "--inner.lr", *common], "--inner.lr needs a value"),
        (["sweep", "diloco", *common, "--data.path", "", "a.txt"], "--data.path '' names no text"),
        (["sweep", "diloco", "--inner.lr", "1", "2", *common, "--samples", "-1"], "--samples must"),
        (
            ["sweep", "diloco", "--inner.lr", "4e-3", "1", "0.004", *common],
            "'lr 4e-3' and 'lr 0.004' are the same; leave one out",
        ),
        (["ablate", "adloco", *common, "--seeds", "0"], "--seeds must be >= 1, got 0"),
        (["ablate", "diloco", *common], "recipe 'diloco' has none of adaptive-batch, merging, sw"),
        (["ablate", "ddp-norm", "--without", "merging", *common], "has no merging to leave out"),
        (["runs", str(tmp_path / "none")], "there is no folder"),
        (["runs", str(tmp_path / "empty")], "holds no runs; begin one with: adloco train"),
    ]:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_the_states_of_runs(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from adloco.run.folder import locked
    from adloco.run.overview import find_runs

    assert main(["train", "diloco", *small, "--run.tokens", "4096"]) == 0
    run = tmp_path / "run"
    (overview,) = find_runs(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert (overview.folder, overview.recipe, overview.state) == (run, "diloco", "finished")
    assert (overview.tokens, overview.loss) == (4096, summary["final_val_loss"])
    assert overview.bytes_communicated == summary["bytes"]
    file = run / "metrics.jsonl"
    whole = file.read_text()
    *before, last = whole.splitlines()
    file.write_text("\n".join([*before, json.dumps(json.loads(last) | {"val_loss": None})]) + "\n")
    assert find_runs(tmp_path)[0].loss is None, "an earlier loss is not that of its end"
    file.write_text(whole)
    with locked(run):
        assert find_runs(tmp_path)[0].state == "running"
    (run / "summary.json").write_text(json.dumps(summary)[:50])
    assert find_runs(tmp_path)[0].state == "damaged"
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert find_runs(tmp_path)[0].state == "stopped at 50%"
    assert overview.interruptions == 0
    starts = (run / "starts.jsonl").read_text().splitlines()
    killed = json.loads(starts[0]) | {"kind": "resume", "failed": True}
    (run / "starts.jsonl").write_text(f"{starts[0]}\n{json.dumps(killed)}\n")
    assert find_runs(tmp_path)[0].interruptions == 1
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["failures", "age"] and line.split()[-3] == "1"
    (run / "starts.jsonl").write_text("damaged\n" * 2)
    assert find_runs(tmp_path)[0].interruptions is None
