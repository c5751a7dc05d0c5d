"""`adloco plan --cluster` as a user calls it: what it says, what it writes, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, read_values
from adloco.plan.gap_law import gap

CLUSTER = """
islands = 4
bandwidth = "10mbit"
latency = "20ms"
jitter = 0.05

[samples_per_second]
1 = 4.0
8 = 16.0
"""
AXES = ["--method.sync_every", "10", "100", "--wire.format", "fp32", "int4"]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def plan(cluster: Path, *words: str) -> int:
    to = str(cluster.parent / "plan")
    return main(["plan", "--cluster", str(cluster), "--parameters", "10M", "--to", to, *words])


def test_whose_speed_the_file_has_is_always_among_the_assumptions(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was measured with another model would make the plan wrong."""
    words = ["plan", "diloco", "--cluster", str(cluster), "--to", str(cluster.parent / "plan")]
    axes = ["--method.sync_every", "10", "--wire.format", "fp32"]
    assert main([*words, *axes, "--run.tokens", "1000000"]) == 0
    said = capsys.readouterr().out
    assert f"Islands train 869504 parameters at the speed in {cluster}." in said


def test_a_plan_for_tokens(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # Where output is not a terminal, rows stay whole.
    words = ["ddp", "diloco", "--run.tokens", "1000000", *AXES]
    assert plan(cluster, *words, "--price", "3") == 0
    said = capsys.readouterr().out
    folder = cluster.parent / "plan"
    found = json.loads((folder / "plan.json").read_text())
    chosen = found["advice"]["chosen"]["label"]
    assert f"recommended: {chosen}" in said
    assert re.search(rf"^ {chosen} .* \d+% .*B", said, re.MULTILINE)
    assert "The noise scale is missing, so all figures hold with batches of 8" in said
    assert "The best of each method with batches of 8 samples only" in said
    assert len(found["predictions"]) == 5, "one of ddp and four of diloco"
    assert "set its model.* to a model of 1e+07 parameters" in said and "train it" not in said
    text = (folder / "recipe.toml").read_text()
    assert "set its model.* to a model of 1e+07 parameters" in text.partition("[run]")[0]
    assert "adloco train" not in (folder / "plan.html").read_text()
    with pytest.raises(ValueError, match="model.shape must be nano, .* got ''"):
        build_recipe(read_values(str(folder / "recipe.toml")))
    (folder / "recipe.toml").write_text(text.replace('shape = ""', 'shape = "tinyllama"'))
    recipe = build_recipe(read_values(str(folder / "recipe.toml")))
    every = recipe.method.sync_every
    assert recipe.method.workers_per_trainer == 4
    syncs = recipe.run.tokens / (recipe.guards.initial * recipe.data.context_tokens * every)
    times = gap(1e7, 4, syncs).times_tokens()
    assert recipe.run.tokens == pytest.approx(1_000_000 * times), "more tokens have more syncs"
    range_ = re.search(r"It could take ([\d.]+) to ([\d.]+) times its [\d,]+ tokens", said)
    assert range_ and float(range_[1]) < 1 < float(range_[2])
    assert {file.name for file in folder.iterdir()} == {
        "plan.html",
        "plan.png",
        "plan.json",
        "plan.csv",
        "recipe.toml",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adloco", "--run.tokens", "1000000"], "follows the noise scale, which is not known"),
        (["adloco", "diloco", "--noise-scale", "50"], "must have one budget in tokens"),
        (["ddp", "--run.tokens", "1000", "2000"], "got ddp: 1,000, ddp: 2,000"),
        (["diloco", "--target-loss", "2"], "--target-loss needs --runs RUN"),
        (["nothing"], "recipe 'nothing' is neither a file nor a shipped recipe"),
        (["diloco", "--method.sync_evry", "5"], "sync_evry"),
        (["adloco", "--noise-scale", "9", "--method.num_trainers", "3"], "do not divide 4 islands"),
        (["diloco", "--runs", "no/run"], "no/run"),
        (["ddp", "--parameters", "1e40"], "--parameters must be a number from 1 to 1e+13, got"),
    ],
)
def test_what_cannot_be_planned(
    words: list[str], message: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(cluster, *words) == 2
    assert message in capsys.readouterr().err
    assert not (cluster.parent / "plan").exists()


def test_more_fragments_than_layers(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--streaming.fragments", "9", "--method.sync_every", "20", "--model.num_layers", "2"]
    words += ["--run.tokens", "1000", "--to", str(cluster.parent / "plan")]
    assert main(["plan", "diloco", "--cluster", str(cluster), *words]) == 2
    assert "streaming.fragments must be <= 5, the layers of this model" in capsys.readouterr().err


def test_a_recipe_with_the_model_that_was_planned_can_be_trained(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run.tokens", "1000", "--to", str(cluster.parent / "plan")]
    assert main(["plan", "ddp", "--cluster", str(cluster), *words]) == 0
    said = capsys.readouterr().out
    assert "train it: adloco train" in said and "model.*" not in said
    assert "adloco train" in (cluster.parent / "plan" / "plan.html").read_text()
    assert build_recipe(read_values(str(cluster.parent / "plan" / "recipe.toml")))


def test_rounds_that_become_longer(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round has the mean number of steps of a run that follows the schedule to its end."""
    words = ["diloco", "--run.tokens", "100000000", "--method.sync_every", "100"]
    words += ["--wire.format", "int1", "--method.sync_growth", "1"]
    assert plan(cluster, *words) == 0
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())["advice"]["chosen"]
    # 2% of warm-up, then a half cosine from 1 to 0.1.
    assert found["inner_steps"] / found["syncs"] == pytest.approx(100 / (0.02 + 0.98 * 0.55))
    capsys.readouterr()
    assert plan(cluster, *words, "--learning_rate.final_fraction", "0") == 2
    assert "method.sync_growth needs a learning rate that falls" in capsys.readouterr().err


def test_a_plan_or_a_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert (
        "give --cluster FILE.toml for a plan, --measured FILE.csv for a fit"
        in capsys.readouterr().err
    )
