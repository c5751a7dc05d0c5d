"""What a comparison says of curves, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from adloco.metrics import NATS, ROUND, Metric
from adloco.report.compare_files import to_csv, to_json
from adloco.report.compare_page import comparison_chart, tables
from adloco.report.pictures import draw_comparison
from adloco.run.records import Records
from adloco.study.arms import plan_runs
from adloco.study.comparison import Comparison, RunCurves, compare

LINE = {
    **{"round": 1, "tokens": 1, "inner_steps": 1, "syncs": 1, "seconds": 1.0, "val_loss": 2.0},
    **{"bytes_sent": 1.0, "bytes_ddp_equivalent": 1.0, "trainers": [{"workers": 1}]},
}
"""A line of metrics.jsonl."""


def against(*ends: tuple[float, float]) -> Comparison:
    """Two arms, whose seeds fall from 4 to these losses over 100 tokens and 10 syncs."""
    runs = plan_runs(["a=diloco", "b=diloco"], [], len(ends), Path("study"))
    arms: dict[str, list[RunCurves]] = {"a": [], "b": []}
    for run in runs:
        last = ends[run.seed]["ab".index(run.arm)]
        axes = {"tokens": [0.0, 100.0], "syncs": [0.0, 10.0]}
        curve = RunCurves(run=run, axes=axes, measures={"val_loss": [4.0, last]}, corpus="")
        arms[run.arm].append(curve)
    return Comparison(
        arms=arms,
        axes={name: ROUND[name] for name in ("tokens", "syncs")},
        measures=(Metric("val_loss", "validation loss", NATS),),
        targets=(3.0,),
        replicas=2,
        equal=(),
        unequal=(),
        marked=(),
        differs=(),
    )


def test_many_settings_that_differ_are_named_without_their_values() -> None:
    found = against((0.0, 2.0))
    assert found.differing.startswith("Differs: nothing. Fewer than 5 rounds: a, b; ")
    trainers = "trainers=adloco@--merge.policy none"
    for alone in plan_runs(["single", trainers], [], 1, Path("study")):
        silent = replace(found, arms={alone.arm: [replace(found.arms["a"][0], run=alone)]})
        assert silent.differing == "Differs: nothing."
    many = replace(found, differs=tuple(f"inner.lr{n} (a: 0.1, b: 0.2)" for n in range(20)))
    assert "Differs: inner.lr0, inner.lr1, " in many.differing
    assert many.differing.count("(") == 1 and "(their values are in compare.json)" in many.differing


def test_differences_of_what_a_target_needs() -> None:
    """To fall from 4 to 3: the first arm takes 25, 50, 50 of 100 tokens, the second 50, 100, and
    with the third seed it ends at 3.5. So -25 and -50: mean -37.5, deviation 17.68, t = 12.706.
    """
    found = against((0.0, 2.0), (2.0, 3.0), (2.0, 3.5))
    (tokens,), (syncs,) = map(found.differences, found.needed(3.0))
    assert (tokens.first, tokens.second, tokens.mean, tokens.seeds) == ("a", "b", -37.5, 2)
    assert tokens.half_width == pytest.approx(12.706 * 12.5)
    assert (syncs.mean, syncs.clear) == (-3.75, False)
    content = to_json(found)["differences_to_target"]["3"]
    assert [content[axis][0]["mean"] for axis in ("tokens", "syncs")] == [-37.5, -3.75]
    *_, table = tables(found)
    assert table.title == "Differences of what validation loss 3 needs"
    ((pair, seeds, *cells),) = table.rows
    assert (pair.text, seeds.text) == ("a - b", "2")
    assert [cell.text for cell in cells] == ["-37.5 ± 158.8", "-3.8 ± 15.9"]
    assert [cell.detail for cell in cells] == ["no clear difference"] * 2


def test_a_run_whose_last_evaluation_is_not_finite_counts_in_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line has no loss then, but memory of the evaluation. Losses fall from 4 to 2."""
    falls = [LINE | {"val_loss": 4.0}, LINE | {"round": 2, "tokens": 2}]
    lost = LINE | {"round": 3, "tokens": 3, "val_loss": None, "memory": {"evaluation": {}}}
    monkeypatch.setattr(
        Records, "read_whole", lambda records: falls + [lost] * records.folder.name.startswith("b")
    )
    runs = plan_runs(["a=diloco", "b=diloco"], [], 1, Path("study"))
    found = compare(runs, targets=[3.0], links=[], problems={})
    assert [found.arms[arm][0].problem for arm in "ab"] == ["", "its last evaluation is not finite"]
    for quantity in (*found.finals, *found.totals, *found.needed(3.0)):
        assert found.differences(quantity) == []
        assert found.spread(quantity, "b").count == 0
    with pytest.raises(ValueError, match="no run ended with a finite evaluation"):
        compare(runs[1:], targets=[], links=[], problems={})


@pytest.mark.parametrize(
    ("losses", "target"),
    [((2.34561, 1.0), 2.346), ((2e-4, 1e-5), 2e-4), ((1.23456e-4, 1e-5), 1.235e-4), ((0, 0), 0)],
)
def test_a_target_is_the_highest_final_loss_to_four_digits(
    losses: tuple[float, float], target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = dict(zip("ab", map(float, losses), strict=True))
    monkeypatch.setattr(
        Records, "read_whole", lambda records: [LINE | {"val_loss": ends[records.folder.name[0]]}]
    )
    runs = plan_runs(["a=diloco", "b=diloco"], [], 1, Path("study"))
    assert compare(runs, targets=[], links=[], problems={}).targets == (target,)


def test_a_clear_difference_is_named_and_a_target_that_one_arm_misses_is_not_compared() -> None:
    """Both seeds of the first arm take 25 tokens, those of the second 50 and 52: -25 and -27."""
    *_, table = tables(against((0.0, 2.0), (0.0, 4 - 100 / 52)))
    assert table.rows[0][2].text == "-26.0 ± 12.7" and table.rows[0][2].detail == "a needs less"
    missed = against((2.0, 3.5), (2.0, 3.5))
    assert missed.differences(missed.needed(3.0)[0]) == []
    assert [table.title for table in tables(missed)][-1] == "Differences of the final loss"


def test_every_arm_of_a_picture_looks_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = against((2.0, 2.0))
    arms = {f"arm {number}": found.arms["a"] for number in range(24)}
    found = replace(found, arms=arms)
    draw_comparison(comparison_chart(found), found.statement, tmp_path)
    (figure,) = drawn
    shown = figure.legends[0].get_lines(), figure.axes[0].get_lines(), figure.axes[1].get_lines()
    for lines in shown:
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 24


def comparison(problem: str = "") -> Comparison:
    """Two seeds of an arm that fall from 4 to 2 and to 1 over 100 tokens; the second may have a
    problem.
    """
    runs = plan_runs(["diloco"], [], 2, Path("study"))
    curves = [
        RunCurves(
            run=run,
            axes={"tokens": [0.0, 100.0]},
            measures={"val_loss": [4.0, last]},
            corpus="",
            problem=text,
        )
        for run, last, text in zip(runs, (2.0, 1.0), ("", problem), strict=True)
    ]
    return Comparison(
        arms={"diloco": curves},
        axes={"tokens": ROUND["tokens"]},
        measures=(Metric("val_loss", "validation loss", NATS),),
        targets=(2.5,),
        replicas=2,
        equal=("data",),
        unequal=(),
        marked=(),
        differs=(),
    )


def test_means_over_seeds() -> None:
    found = comparison()
    assert found.spread(found.finals[0], "diloco").mean == 1.5
    # From 4 to 2 it passes 2.5 after 75 tokens, from 4 to 1 after 50.
    assert found.spread(found.needed(2.5)[0], "diloco").mean == 62.5


def test_a_run_that_did_not_end_enters_no_number_but_its_curve() -> None:
    found = comparison(problem="loss is nan")
    assert found.spread(found.finals[0], "diloco").mean == 2.0
    assert found.spread(found.totals[0], "diloco").count == 1
    assert found.spread(found.needed(2.5)[0], "diloco").mean == 75
    rows = to_csv(found).splitlines()
    assert rows[2].startswith("diloco,1,") and rows[2].endswith("loss is nan,,,")
    (arm,) = to_json(found)["arms"]
    assert arm["runs"][1]["measures"]["val_loss"] == [4.0, 1.0]


def test_an_arm_that_lost_seeds_is_not_the_best() -> None:
    """One seed of the first arm ended at 1.0, and the other diverged."""
    found = against((1.0, 2.0), (1.0, 2.0))
    one, two = found.arms["a"]
    found = replace(found, arms={**found.arms, "a": [one, replace(two, problem="loss is nan")]})
    assert found.best == "b"
    assert replace(found, arms={"a": [one], "b": found.arms["b"]}).best == "b"
    (_, loss, *_), _ = tables(found)[0].rows
    assert loss.text == "1.0000 (1 of 2 seeds)"


def test_data_parallel_training_has_as_many_replicas_as_the_widest_trainer_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainers of one worker each that merge: a trainer of three, and in the end one of four."""
    shapes = [(1, 1, 1, 1), (3, 1), (4,)]
    lines = [
        {**LINE, "round": number, "trainers": [{"workers": workers} for workers in shape]}
        for number, shape in enumerate(shapes, start=1)
    ]
    runs = plan_runs(["ddp", "adloco-paper"], [], 1, Path("study"))
    for rounds, replicas in ((1, 2), (2, 3), (3, 4)):
        monkeypatch.setattr(Records, "read_whole", lambda _, last=rounds: lines[:last])
        assert compare(runs, targets=[], links=[], problems={}).replicas == replicas


def test_swept_tokenizers_are_marked_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not held equal is refused after training, too."""
    monkeypatch.setattr(Records, "read_whole", lambda _: [LINE])
    runs = plan_runs(["diloco", "a=diloco@--data.tokenizer bpe:300"], [], 1, Path("study"))
    found = compare(runs, targets=[], links=[], problems={}, varied=["data.tokenizer"])
    assert found.unequal == ()
    assert found.warning == (
        " NOT HELD EQUAL: tokenizer (data.tokenizer: diloco: bytes, a: bpe:300)."
    )
    assert to_json(found)["not_held_equal"] == [*found.marked]


def test_models_from_python_of_other_sizes_are_not_held_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No setting tells them apart: they were averaged as two seeds of one arm."""
    monkeypatch.setattr(Records, "read_whole", lambda _: [LINE])
    runs = plan_runs(["diloco"], [], 2, tmp_path)
    for run, size in zip(runs, (161, 641), strict=True):
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text(json.dumps({"num_parameters": size}))
    found = compare(runs, targets=[], links=[], problems={})
    assert found.unequal == ("model (its parameters that are trained: diloco: 161 or 641)",)
    assert "model" not in found.equal


def test_losses_of_other_texts_reach_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an island was dropped, the loss is that of the other one's text alone."""
    rows = [{"island": "easy"}, {"island": "hard"}]
    lines = [
        {**LINE, "round": 1, "tokens": 1, "val_loss": 4.0, "islands": rows},
        {**LINE, "round": 2, "tokens": 2, "val_loss": 2.9, "islands": rows[:1]},
    ]
    monkeypatch.setattr(Records, "read_whole", lambda _: lines)
    runs = plan_runs(["diloco", "b=diloco"], [], 1, Path("study"))
    found = compare(runs, targets=[3.0], links=[], problems={})
    assert found.spread(found.needed(3.0)[0], "diloco").mean is None
    assert found.unequal == ()
    kept = {runs[0].folder: lines, runs[1].folder: lines[:1]}
    monkeypatch.setattr(Records, "read_whole", lambda records: kept[records.folder])
    found = compare(runs, targets=[3.0], links=[], problems={})
    assert found.unequal == ("islands whose texts are evaluated at the end",)
