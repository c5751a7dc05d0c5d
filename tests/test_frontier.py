"""benchmarks/frontier.py: its trials, the tables of invented runs, and a run of its own."""

from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def frontier() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return import_module("frontier")


def test_options_that_cannot_work(frontier: Any) -> None:
    with pytest.raises(ValueError, match="--parallel must be >= 1, got 0"):
        frontier.main(["--parallel", "0"])


def test_every_trial_is_another_run(frontier: Any) -> None:
    keys = [trial.spec(1000).key for model in frontier.PROBLEMS for trial in frontier.trials(model)]
    assert len(set(keys)) == len(keys)


def test_stored_runs_keep_their_keys_when_a_setting_is_renamed(frontier: Any) -> None:
    stored = frontier.Store(BENCHMARKS / "frontier.json").read()
    renamed = [trial for trial in frontier.trials("small") if "feedback_decay" in trial.more]
    assert [trial.spec(frontier.TUNING_SEED).key in stored for trial in renamed] == [True, True]


def test_the_tables(frontier: Any, tmp_path: Path) -> None:
    def run(loss: float, megabytes: float, diverged: str = "") -> dict[str, Any]:
        curve = {} if diverged else {"bytes": [1e6 * megabytes], "syncs": [3]}
        told = {"git": None, "torch": "2", "threads": 1, "curve": curve, "diverged": diverged}
        return told | {"final_loss": loss, "tail_loss": loss - 0.01}

    store = frontier.Store(tmp_path / "runs.json")
    with pytest.raises(ValueError, match=r"there are no runs in .*; run without --table first"):
        frontier.main(["--table", "--json", str(store.file)])
    ddp, other, best = frontier.finals("small")[:3]
    store.add(ddp.spec(1000).key, run(2.0, 1500.0))
    store.add(other.spec(1000).key, run(0.0, 0.0, diverged="not finite"))
    for seed, (ddp_loss, loss) in enumerate([(1.9, 2.0), (2.1, 2.2)]):
        store.add(ddp.spec(seed).key, run(ddp_loss, 1500.0))
        store.add(best.spec(seed).key, run(loss, 7.5))
    frontier.main(["--table", "--json", str(store.file)])
    finals, trials = (tmp_path / "runs.md").read_text().split("## The small model: trials")
    row = next(line for line in finals.splitlines() if line.startswith("| diloco-int2"))
    # Means of 2.1 and 2.0; 1500 MB are 200 times 7.5.
    assert row.split(" | ")[7:] == [
        *("2", "2.1000 (2.0000 to 2.2000)", "+5.0%", "2.0900", "7.50", "200x", "3 |")
    ]
    assert "| 1 | diverged | - |" in trials


@pytest.mark.nightly
def test_one_worker_stands_for_four_that_reduce_at_each_step(
    frontier: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = {"data.path": str(corpus), "data.cache": str(tmp_path / "cache")} | {
        name: value for name, value in SMALL.items() if name.startswith(("model.", "data.contex"))
    }
    trial = frontier.Trial(arm="outer-alone", sync_every=2, more="evaluation.windows=8")
    spec = trial.spec(0)
    spec = replace(spec, tokens=2048, problem=spec.problem + tuple(problem.items()))
    options = Namespace(json=tmp_path / "runs.json", parallel=1)
    frontier.trained([spec], options)
    result = frontier.Store(options.json).read()[spec.key]
    steps = result["curve"]["syncs"][-1]
    assert result["curve"]["bytes"] == [steps * 4 * result["parameters"]]
    diverging = replace(spec, inner_lr=1e30)
    frontier.trained([diverging], options)
    assert "learning rate" in frontier.Store(options.json).read()[diverging.key]["diverged"]
