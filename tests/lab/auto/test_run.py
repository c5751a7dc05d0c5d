"""A run in its folder that chooses H itself: what it writes about it."""

import json
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster


def test_changes_are_written_where_people_look(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a cost near 1 any sync is too long to have fewer of, so H falls to its minimum."""
    auto = ["--auto.sync_interval", "true", "--auto.every", "2", "--auto.sync_cost", "0.9999"]
    auto += ["--method.sync_every", "4", "--run.tokens", "0", "--run.rounds", "5"]
    constant = ["--learning_rate.shape", "constant", "--learning_rate.warmup_fraction", "0"]
    assert main(["train", "diloco", *small, *auto, *constant]) == 0
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["sync_every"] for record in records] == [4, 4, 2, 2, 1]
    assert [record["inner_steps"] for record in records] == [4, 8, 10, 12, 13]
    (change,) = records[1]["changes"]
    text = f"round 2: sync_every 4 -> 2: {change['reason']}"
    assert change["reason"].endswith("% of the time, and 100% is best")
    for said in ((run / "train.log").read_text(), capsys.readouterr().out):
        assert text in said
    page = (run / "report.html").read_text()
    assert ">sync_every 4 -&gt; 2</td>" in page and change["reason"] in page
    assert "sync_interval = true" in (run / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["single", "--auto.sync_interval", "true"], "must be false where no trainer ever has two"),
        (["diloco", "--method.sync_every", "auto"], "method.sync_every must be a whole number"),
        (["diloco", "--auto.every", "0"], "auto.every must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_plan_needs_numbers() -> None:
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    with pytest.raises(ValueError, match="auto.sync_interval must be false here"):
        candidates(["diloco"], [("auto.sync_interval", "true")], cluster)
