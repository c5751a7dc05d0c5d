"""benchmarks/gap.py: its runs, what they choose from each other, the law, and a tiny grid."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco.plan.gap_law import gap as planned


@pytest.fixture
def gap() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return import_module("gap")


def rows_of(gap: Any, losses: dict[Any, float]) -> dict[Any, dict[str, str]]:
    """Invented rows; the method's name decides about bytes and syncs."""
    rows = {}
    for run, loss in losses.items():
        syncs = {"int1-h3": 100, "int1-h11": 30}.get(run.method, 1000)
        size = 4 * run.parameters / (32 if run.method.startswith("int1") else 1)
        curve = {"bytes": [syncs * size], "syncs": [syncs * run.tokens / run.parameters]}
        result = {"parameters": run.parameters, "curve": curve, "final_loss": loss, "git": None}
        rows[run.identity] = run.row(result | {"device": "a processor"})
    return rows


def test_the_settings_of_a_run(gap: Any) -> None:
    chosen = gap.trials("int1-h3", 8, 80, {})[0][1]
    assert (chosen.tokens, chosen.lr, chosen.outer_lr) == (20 * 133_440, 1.1e-2, 0.7)
    run = gap.finals(869_504, 80, chosen)[2]
    assert (run.tokens, run.lr, run.seed) == (80 * 869_504, 5.5e-3, 2)  # Twice as wide.
    recipe = run.spec.recipe()
    assert recipe.method.workers_per_trainer == 8
    assert recipe.first_batch == 16  # Samples of 128 tokens.
    for parameters, (width, _, _) in gap.SIZES.items():
        recipe = gap.finals(parameters, 5, chosen)[0].spec.recipe()
        assert recipe.model.hidden_size == width


def test_what_is_wanted_follows_from_what_is_stored(
    gap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap, "GRID", ((275_424, 5, (("int1-h3", 4), ("int1-h11", 4))),))
    methods = (("ddp", 1), ("int1-h3", 4), ("int1-h11", 4))
    trials = [gap.trials(*method, 5, {})[0] for method in methods]
    assert gap.wanted({}) == [run for runs in trials for run in runs]
    # The second setting of each is the best one; that is the middle of ddp's three rates, and the
    # lower of the others' two.
    losses = {run: 2.0 - (i == 1) for runs in trials for i, run in enumerate(runs)}
    finals = [gap.finals(275_424, 5, runs[1]) for runs in trials]
    lower = [replace(runs[1], lr=8e-3) for runs in trials[1:]]
    assert gap.wanted(rows_of(gap, losses)) == [*lower, finals[0][0]]
    losses |= dict.fromkeys(lower, 2.0)
    first = [runs[0] for runs in finals]
    assert gap.wanted(rows_of(gap, losses)) == first
    # 2% above ddp is below three sigma, 5% is not.
    losses |= dict(zip(first, (1.0, 1.02, 1.05), strict=True))
    more = [*finals[0][1:], *finals[1][1:]]
    assert gap.wanted(rows_of(gap, losses)) == more
    losses |= dict.fromkeys(more, 1.0)
    assert not gap.wanted(rows_of(gap, losses))


def test_a_run_that_is_asked_for(gap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "869504,20,fp32-h1,4,1,0.008,1,0"
    run = gap.run_of(words)
    assert (run.tokens, run.windows, run.lr, run.outer_lr) == (20 * 869_504, 0, 0.008, 1.0)
    recipe = run.spec.recipe()
    assert (recipe.method.sync_every, recipe.method.sync_growth) == (1, 0.0)
    (row,) = rows_of(gap, {run: 1.0}).values()
    assert row["stage"] == "trial", "no entry of the grid has it"
    assert gap.run_of("133440,5,ddp,1,2,0.016").momentum == 0
    for bad in ("869504,20,fp32-h1", "1,20,ddp,1,0,0.1", "869504,20,int3,4,0,0.1"):
        with pytest.raises(ValueError, match="a run must be PARAMETERS,RATIO,METHOD"):
            gap.run_of(bad)
    file, trained = tmp_path / "gap.csv", []
    gap.store(row, file)
    monkeypatch.setattr(gap, "train", lambda runs, *_: trained.extend(runs))
    other = words.replace(",1,0.008", ",2,0.008")
    gap.main(["--csv", str(file), "--run", words, other])
    assert trained == [gap.run_of(other)], "the first is stored"


def test_losses_on_all_windows_are_compared_if_there_are_some(gap: Any) -> None:
    ddp, local = (
        gap.finals(133_440, 5, gap.trials(method, workers, 5, {})[0][0])
        for method, workers in (("ddp", 1), ("int1-h3", 4))
    )
    some = {replace(run, windows=256): 2.0 for run in ddp}
    some |= {replace(run, windows=256): 2.1 for run in local}
    (found,) = gap.of_several(gap.gaps(rows_of(gap, some | {ddp[0]: 1.9})))
    assert found.relative == pytest.approx(0.05), "with ddp on some windows alone"
    assert found.difference.seeds == 3
    both = some | {ddp[0]: 1.9, local[0]: 1.938}
    (found,) = gap.of_several(gap.gaps(rows_of(gap, both)))
    assert (found.row["windows"], found.difference.seeds) == ("0", 1)
    assert found.relative == pytest.approx(0.02)


def test_of_several_rates_the_lowest_loss_counts(gap: Any) -> None:
    local, ddp = (
        gap.finals(275_424, 20, gap.trials(*each, 20, {})[0][0])[0]
        for each in (("int1-h3", 4), ("ddp", 1))
    )
    other = replace(local, lr=1e-3)
    for losses in ({local: 2.1, other: 2.06, ddp: 2.0}, {other: 2.06, local: 2.1, ddp: 2.0}):
        (found,) = gap.of_several(gap.gaps(rows_of(gap, losses)))
        assert (found.relative, found.row["lr"]) == (pytest.approx(0.03), "0.001")


def test_the_law_of_invented_gaps(
    gap: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = np.random.default_rng(0)
    places = np.exp(draws.uniform([12, 0.5, 3], [16, 2, 7], (40, 3)))
    constants = np.array([-1.0, 0.4, -0.5, 0.2, 0.01])
    sizes, others, syncs = places[:, 0] / 1e6, places[:, 1] - 1, places[:, 2]
    gaps = others**0.4 * (np.exp(-1.0) * sizes**0.2 / np.sqrt(syncs) + 0.01)
    found = gap.fitted(places, gaps, np.ones(40))
    assert found == pytest.approx(constants, abs=1e-6)

    file = tmp_path / "gap.csv"
    with pytest.raises(ValueError, match="no final runs in .* can be compared"):
        gap.main(["--table", "--csv", str(file)])
    losses = {}
    for parameters, ratio in ((133_440, 5), (133_440, 20), (275_424, 5), (275_424, 20)):
        runs = [gap.finals(parameters, ratio, gap.trials("ddp", 1, ratio, {})[0][0])[:2]]
        for name, workers in (("int1-h3", 4), ("int1-h11", 4), ("int1-h3", 2)):
            runs.append(
                gap.finals(parameters, ratio, gap.trials(name, workers, ratio, {})[0][0])[:2]
            )
        for number, seeds in enumerate(runs):
            losses |= dict.fromkeys(seeds, 2.0 * (1 + 0.1 * number / ratio))
    for row in rows_of(gap, losses).values():
        gap.store(row, file)
    gap.main(["--table", "--fit", "--picture", "--csv", str(file)])
    printed = capsys.readouterr().out
    # 100 syncs of a bit a parameter against 1,000 of 32 bits.
    row = "| 0.13M | 5 | int1-h3 | 4 | 0.011 | 1 / 0.3 | 500 | 320x | 2 | all | 2.0400 |"
    assert f"{row} +2.0% ± 0.0 |" in printed.splitlines()
    assert "| more than 300 syncs | " in printed
    assert file.with_suffix(".png").read_bytes()[1:4] == b"PNG"
    few = [each for each in gap.gaps(gap.read(file)) if each.row["workers"] == "2"]
    with pytest.raises(ValueError, match="the law has 5 constants, and 4 gaps are stored"):
        gap.law(few)


@pytest.mark.nightly
def test_a_tiny_grid_is_trained_once(
    gap: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, layers, context = 16, 1, 32
    small = 2 * 256 * width + 4 * width**2 + 3 * width * 44 + 3 * width
    monkeypatch.setattr(gap, "SIZES", {small: (width, layers, context)})
    monkeypatch.setattr(gap, "SMALLEST", small)
    monkeypatch.setattr(gap, "GRID", ((small, 1, ()),))  # A trial of ddp and a final run.
    methods = {"ddp": replace(gap.METHODS["ddp"], rates=(8e-3,))}
    monkeypatch.setattr(gap, "METHODS", methods)
    monkeypatch.setattr(gap, "RATES", (8e-3,))
    data = {"data.path": str(corpus), "data.cache": str(tmp_path), "evaluation.windows": "8"}
    spec = gap.Run.spec.fget
    with_data = property(
        lambda run: replace(spec(run), problem=(*spec(run).problem, *data.items()))
    )
    monkeypatch.setattr(gap.Run, "spec", with_data)
    monkeypatch.chdir(tmp_path)
    words = ["--parallel", "2", "--csv", str(tmp_path / "gap.csv")]
    gap.main(words)
    rows = gap.read(tmp_path / "gap.csv")
    steps = -(-small // 1024)
    assert [(row["stage"], row["seed"], row["bytes"]) for row in rows.values()] == [
        ("trial", "1000", str(steps * 4 * small)),
        ("final", "0", str(steps * 4 * small)),
    ]
    before = (tmp_path / "gap.csv").read_bytes()
    gap.main(words)
    assert (tmp_path / "gap.csv").read_bytes() == before


def test_plans_have_the_law_of_the_stored_runs(gap: Any) -> None:
    file = Path(__file__).parents[1] / "benchmarks" / "gap.csv"
    best, drawn = gap.law(gap.gaps(gap.read(file)))
    for own in ((133_440, 4, 248), (1e9, 4, 1e4), (1e6, 2, 1e3), (3e5, 8, 99)):
        found, place = planned(*own), np.array([own])
        assert found.expected == pytest.approx(gap.said(best, place)[0][0], rel=0.02)
        drawn_gaps = [gap.said(each, place)[0][0] for each in drawn]
        assert found.deviation == pytest.approx(np.std(drawn_gaps), rel=0.1)
