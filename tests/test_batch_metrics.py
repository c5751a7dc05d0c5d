"""benchmarks/batch_metrics.py: its arms, its matched ramps, and the table of invented runs."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def study() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return import_module("batch_metrics")


def test_every_arm_is_another_recipe(study: Any) -> None:
    specs = [spec for trial in study.ARMS.values() for spec in study.specs_of(trial, 10_000)]
    for spec in specs[:: len(study.SEEDS)]:
        spec.recipe()
    assert len({spec.key for spec in specs}) == len(specs) == len(study.SEEDS) * len(study.ARMS)


def test_a_matched_ramp_takes_as_many_steps(study: Any) -> None:
    # A constant batch of 16 takes 200 steps for 3,200 samples.
    assert study.matched(200, 3200) == 16
    assert 16 < study.matched(150, 3200) < study.matched(90, 3200) <= study.LARGEST


def test_the_table(study: Any, tmp_path: Path) -> None:
    def run(loss: float, steps: int, batch: int) -> dict[str, Any]:
        curve = {"syncs": [steps], "tokens": [64 * 1600]}
        told = {"git": None, "torch": "2", "threads": 1, "diverged": "", "curve": curve}
        return told | {"final_loss": loss, "rounds": [[640, 16, None], [64 * 1600, batch, 3.0]]}

    store, tokens = study.Store(tmp_path / "runs.json"), 64 * 1600
    told = ["--table", "--json", str(store.file), "--tokens", str(tokens)]
    with pytest.raises(ValueError, match=r"there are no runs in .*; run without --table first"):
        study.main(told)
    for seed, (small, loss) in enumerate([(2.0, 2.01), (2.2, 2.2), (2.1, 2.1)]):
        arms = study.ARMS["constant 16"], study.ARMS["muon, eta 2"]
        (first, other) = (study.specs_of(trial, tokens)[seed].key for trial in arms)
        store.add(first, run(small, 100, 16))
        store.add(other, run(loss, 40, 64))
    study.main(told)
    lines = (tmp_path / "runs.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| muon, eta 2 "))
    # 40 steps of 100, 1,600 samples in 40 steps; 0.5% on one of three seeds.
    expected = ["3", "40", "60%", "40", "64", "2.1033 (2.0100 to 2.2000)"]
    assert row.split(" | ")[1:] == [*expected, "+0.17% (+0.5, +0.0, +0.0) |"]
    specs = [spec for trial in study.ARMS.values() for spec in study.specs_of(trial, tokens)]
    ramp = study.ramps(study.stored(specs, store.read()), tokens)
    assert [name.partition(", as ")[2] for name in ramp] == ["muon, eta 2"]
