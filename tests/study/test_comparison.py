"""What a comparison says of curves, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from adloco.metrics import NATS, ROUND, Metric
from adloco.plan.link import Link
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
    for rounds, few in (([0], False), ([1, 4], True), ([1, 5], False)):
        runs = [replace(found.arms["a"][0], axes={"tokens": [0.0] * number}) for number in rounds]
        assert ("Fewer than 5" in replace(found, arms={"a": runs}).differing) == few


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


def test_all_pairs_of_four_arms_and_the_best_with_the_others_of_five() -> None:
    found = against((2.0, 2.0))
    (run,) = found.arms["a"]
    losses = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 4.0, "e": 5.0}
    curves = {arm: [replace(run, measures={"val_loss": [loss]})] for arm, loss in losses.items()}
    found = replace(found, arms=curves)
    assert [(one.first, one.second, one.mean) for one in found.differences(found.finals[0])] == [
        ("b", "a", -2.0), ("b", "c", -1.0), ("b", "d", -3.0), ("b", "e", -4.0)
    ]  # fmt: skip
    four = replace(found, arms={arm: curves[arm] for arm in "abcd"})
    assert len(four.differences(four.finals[0])) == 6
    silent = {arm: [replace(run, axes={"tokens": [9.0], "syncs": [0.0]})] for arm in "ab"}
    (none,) = replace(found, arms=silent).differences(found.totals[1])
    assert (none.mean, none.seeds) == (0.0, 1), "zero is a number"


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
    [((2.34511, 1.0), 2.346), ((2e-4, 1e-5), 2e-4), ((1.23456e-4, 1e-5), 1.235e-4), ((0, 0), 0)],
)
def test_a_target_is_the_highest_final_loss_to_four_digits(
    losses: tuple[float, float], target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first seed of the first arm; the others end at the other loss."""
    monkeypatch.setattr(
        Records,
        "read_whole",
        lambda records: [
            LINE | {"val_loss": float(losses[not records.folder.name.startswith("a-seed-0-")])}
        ],
    )
    runs = plan_runs(["a=diloco", "b=diloco"], [], 2, Path("study"))
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
    rose = replace(found.arms["diloco"][0], measures={"val_loss": [4.0, 1.0, 2.0, None]})
    assert rose.last("val_loss") == 2.0


def test_a_run_that_did_not_end_enters_no_number_but_its_curve() -> None:
    found = comparison(problem="loss is nan")
    assert found.statement == "Held equal: data; 1 seed of each arm."
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
    """Trainers of one worker each that merge: a trainer of three, and in the end one of four. In 10
    steps each of four replicas sends 2 x 3/4 of 1 MB.
    """
    shapes = [(1, 1, 1, 1), (3, 1), (4,)]
    alone = {"sync": {"exposed_seconds": 0.0}, "tokens_per_second": 0.0}
    alone |= {"inner_steps": 10, "bytes_ddp_equivalent": 1e6}
    lines = [
        {**LINE, **alone, "round": number, "trainers": [{"workers": workers} for workers in shape]}
        for number, shape in enumerate(shapes, start=1)
    ]
    runs = plan_runs(["ddp", "adloco-paper"], [], 1, Path("study"))
    for rounds, replicas in ((1, 2), (2, 3), (3, 4)):
        monkeypatch.setattr(Records, "read_whole", lambda _, last=rounds: lines[:last])
        found = compare(runs[:1], targets=[], links=[Link.parse("8mbit")], problems={})
        assert found.replicas == replicas
        assert f" ddp: {replicas} replicas that sync in each step." in found.statement
    axes = found.arms["ddp"][0].axes
    assert (axes["syncs"][-1], axes["sent"][-1]) == (10, 1.5e6)
    assert axes["seconds on 8mbit"][-1] == 1.0 + 1.5
    adloco = compare(runs[1:], targets=[], links=[], problems={}).arms["adloco-paper"][0]
    assert (adloco.axes["syncs"][-1], adloco.axes["sent"][-1]) == (1, 1.0)


@pytest.mark.parametrize(
    ("what", "swept", "before", "after"),
    [
        ("tokenizer", "data.tokenizer", "bytes", "bpe:300"),
        ("validation windows", "evaluation.windows", "64", "8"),
        ("data", "data.context_tokens", "128", "64"),
    ],
)
def test_swept_things_that_losses_depend_on_are_marked_and_not_refused(
    what: str, swept: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not held equal is refused after training, too."""
    monkeypatch.setattr(Records, "read_whole", lambda _: [LINE])
    runs = plan_runs(["diloco", f"a=diloco@--{swept} {after}"], [], 1, Path("study"))
    found = compare(runs, targets=[], links=[], problems={}, varied=[swept])
    assert found.unequal == ()
    assert found.warning == f" NOT HELD EQUAL: {what} ({swept}: diloco: {before}, a: {after})."
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
    (runs[0].folder / "summary.json").unlink()
    assert compare(runs, targets=[], links=[], problems={}).unequal == (), "one is not known"


def test_texts_and_models_are_held_equal_unless_they_are_varied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text behind a path may change between two runs; not every run says which it was."""
    monkeypatch.setattr(Records, "read_whole", lambda _: [LINE])
    runs = plan_runs(["diloco", "a=diloco", "b=diloco"], [], 1, tmp_path)
    for run, text in zip(runs, ("one", "two", ""), strict=True):
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text(json.dumps({"corpus": text}))
    found = compare(runs, targets=[], links=[], problems={})
    assert found.unequal == ("text (fingerprints diloco: one; a: two; b: -)",)
    assert compare(runs[1:], targets=[], links=[], problems={}).unequal == ()
    varied = compare(runs, targets=[], links=[], problems={}, varied=["data.path"])
    assert varied.unequal == ()
    streaming = [
        ("data.dataset", "d"),
        ("data.streaming", "true"),
        ("data.validation_samples", "9"),
    ]
    streams = [
        replace(run, folder=of.folder)
        for run, of in zip(
            plan_runs(["diloco", "a=diloco"], streaming, 1, tmp_path), runs, strict=False
        )
    ]
    assert compare(streams, targets=[], links=[], problems={}).unequal == (), "read only in part"
    larger = plan_runs(["c=diloco@--model.hidden_size 64"], [], 1, tmp_path)
    larger[0].folder.mkdir(parents=True)
    for run, size in ((runs[2], 161), (larger[0], 641)):
        (run.folder / "summary.json").write_text(json.dumps({"num_parameters": size}))
    both, shown = [runs[2], *larger], "model (model.hidden_size: b: 0, c: 64)"
    assert compare(both, targets=[], links=[], problems={}).warning == f" NOT HELD EQUAL: {shown}."
    swept = compare(both, targets=[], links=[], problems={}, varied=["model.hidden_size"])
    assert swept.unequal == ()


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
