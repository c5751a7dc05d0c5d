"""Successive halving of a sweep's arms."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from adloco.study.arms import StudyRun, planned_run
from adloco.study.halving import better_half, loss_at, parse_parts
from adloco.study.training import train_missing

TRAINER = """\
    #!{python}
    # Stands for `adloco train`: a round in 0.05 s, whose loss falls to the run's learning rate.
    import json, pathlib, sys, time, tomllib

    word = sys.argv[4] if sys.argv[4] != "--resume" else sys.argv[5] + "/recipe.toml"
    recipe = tomllib.loads(pathlib.Path(word).read_text())
    folder = pathlib.Path(recipe["run"]["folder"])
    if recipe["inner"]["lr"] == 9:
        sys.exit("adloco: broken")
    (folder / "checkpoints" / "round-000000").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "round-000000" / "run.sha256").touch()
    (folder / "recipe.toml").write_text(pathlib.Path(word).read_text())
    metrics = folder / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    with open(folder / "starts", "a") as starts:
        starts.write("start ")
    try:
        for round in range(done + 1, 11):
            time.sleep(0.05)
            loss = recipe["inner"]["lr"] + 1 / round if round % 2 == 0 else None
            with metrics.open("a") as out:
                out.write(json.dumps(dict(tokens=round * 100, round=round, val_loss=loss)) + "\\n")
    except KeyboardInterrupt:
        sys.exit(130)
    (folder / "summary.json").write_text("{{}}")
    """


def runs_of(folder: Path, rates: list[str]) -> list[StudyRun]:
    common = [("run.tokens", "1000"), ("inner.optimizer", "sgd")]
    changes = [(rate, [("inner.lr", rate)]) for rate in rates]
    return [planned_run(arm, "single", common, own, 0, folder) for arm, own in changes]


def test_words() -> None:
    assert parse_parts("") == () and parse_parts("0.25, 0.5") == (0.25, 0.5)
    for text in ("half", "0", "1", "0.5,0.25", "0.5,0.5"):
        with pytest.raises(ValueError, match=r"--halve-at must be .*, got"):
            parse_parts(text)


def test_the_better_half() -> None:
    losses = {"a": 3.0, "b": float("nan"), "c": 1.0, "d": 2.0, "e": 2.0}
    assert better_half(losses) == ["c", "d", "e"]
    assert better_half({"a": float("inf"), "b": 5.0}) == ["b"]


def test_the_loss_at_a_part_of_the_budget(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, ["0.1"])
    assert loss_at(run, 0.5) is None
    run.folder.mkdir(parents=True)
    rows = [(200, None), (400, 4.0), (500, None), (800, 2.0)]
    lines = [
        {"tokens": tokens, "round": number, "val_loss": loss}
        for number, (tokens, loss) in enumerate(rows, start=1)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # From 4 at 400 of 1,000 tokens to 2 at 800: 3.5 at half of them.
    assert loss_at(run, 0.5) == 3.5
    assert loss_at(run, 0.8) == 2.0
    with pytest.raises(ValueError, match=r"is before the first evaluation of 0\.1, at 0\.40 of"):
        loss_at(run, 0.1)
    assert loss_at(run, 0.9) is None


def test_the_worse_half_stops_and_the_same_study_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four arms, halved after a quarter and after half of the budget: one trains to the end. It was
    paused twice, the second arm once. The arm that fails counts in the first halving alone.
    """
    script = tmp_path / "trainer"
    script.write_text(textwrap.dedent(TRAINER).format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("adloco.study.training.POLL_SECONDS", 0.02)
    runs = runs_of(tmp_path, ["9", "0.1", "0.3", "0.2"])
    for _ in range(2):
        *_, jobs = train_missing(runs, tmp_path, parallel=2, halve_at=(0.25, 0.5))
        assert [job.state for job in jobs] == ["failed", "done", "stopped", "stopped"]
        # After 250 tokens losses are between those of 200 and 400: lr + 1/2 - 1/16.
        assert jobs[2].problem == (
            "at 25% of its budget its arm's loss, 0.7375, was not among the best 2 of 4"
        )
        assert jobs[3].problem == (
            "at 50% of its budget its arm's loss, 0.4083, was not among the best 1 of 2"
        )
        assert jobs[0].problem == "broken"
        starts = [(run.folder / "starts").read_text().split() for run in runs[1:]]
        assert [len(words) for words in starts] == [3, 1, 2]
    lengths = [len((run.folder / "metrics.jsonl").read_text().splitlines()) for run in runs[1:]]
    assert lengths[0] == 10 and all(4 <= length < 10 for length in lengths[1:])
