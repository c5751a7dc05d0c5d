"""benchmarks/studies.py: its arms, the choice among trials, and the table of invented runs."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def study() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return import_module("studies")


@pytest.mark.nightly
def test_every_arm_of_a_study_has_as_many_trials(study: Any) -> None:
    for name, each_study in study.STUDIES.items():
        assert each_study.against in each_study.arms
        trials = [arm.trials() for arm in each_study.arms.values()]
        factorial = name in ("muon", "adamw")
        assert {len(each) for each in trials} == {6 if factorial else 3}
        keys = [spec.key for each in trials for spec in each]
        assert len(set(keys)) == len(keys)
        for first in (spec.recipe() for each in trials for spec in each):
            workers = first.method.num_trainers * first.method.workers_per_trainer
            assert workers == (1 if first.run.name.startswith("ddp") else 4)
            if factorial:
                assert first.first_batch * first.method.num_trainers in (16, 32, 64)


def test_the_best_trial_and_the_table(study: Any, tmp_path: Path) -> None:
    def run(loss: float) -> dict[str, Any]:
        curve = {"syncs": [10], "bytes": [25_000_000]}
        about = {"git": None, "torch": "2", "threads": 1, "diverged": "", "curve": curve}
        return about | {"final_loss": loss, "inner_steps": 200}

    store = study.Store(tmp_path / "runs.json")
    # 100 * 1.36 / 1.36 is not 100, but no arm differs from itself.
    for name, factors in (("DiLoCo 0.6", (1, 1, 1)), ("DiLoCo 0.9", (1.10, 1.11, 1.12))):
        trials = study.STUDIES["muon"].arms[name].trials()
        for number, spec in enumerate(trials):
            store.add(spec.key, run(3.0 if number != 4 else 1.0))
        assert study.best(study.STUDIES["muon"].arms[name], store.read()) == trials[4]
        for seed, factor in enumerate(factors):
            store.add(replace(trials[4], seed=seed).key, run(1.36 * factor))
    study.main(["--table", "--json", str(store.file)])
    text = store.file.with_suffix(".md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| DiLoCo")]
    assert len(rows) == 2
    # 200 steps of 50 ms, 25 MB in 2 s, 10 syncs of 120 ms. Gaps of 10, 11, 12%: 4.303 / 3 ** 0.5.
    assert rows[0].endswith("| 3 | 200 | 10 | 25.0 | 13 | 1.3600 | - |")
    assert rows[1].endswith("| 3 | 200 | 10 | 25.0 | 13 | 1.5096 | +11.00% ± 2.48 (n = 3) |")
