"""The files of a plan say what the plan predicts."""

import csv
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from adloco.config.recipe import build_recipe, read_values
from adloco.config.sections import Recipe
from adloco.plan.advice import by_method, pareto
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.cluster_plan import BANDWIDTHS, Plan, make_plan
from adloco.plan.prediction import Prediction, Workload
from adloco.plan.target import Target
from adloco.report.pictures import draw
from adloco.report.plan_curves import plan_curves
from adloco.report.plan_page import (
    best_table,
    cluster_words,
    crossing_text,
    range_text,
    write_plan,
)
from adloco.report.readable import BYTES, COUNTS, RATES, TIMES, readable

CLUSTER = Cluster(islands=4, bandwidth="100mbit", samples_per_second={8: 16.0}, price_per_hour=2.0)


def sync_every(recipe: Recipe) -> int:
    return 1 if recipe.data_parallel else recipe.method.sync_every


def budget(recipe: Recipe, batch: float) -> float:
    """More tokens where workers sync less often; out of reach with H = 500."""
    every = sync_every(recipe)
    return math.inf if every == 500 else 1e8 * (1 + every / 40)


def loss_after(recipe: Recipe, batch: float, tokens: float) -> float:
    return 2.0 + 0.001 * sync_every(recipe)


@pytest.fixture(scope="module")
def plan() -> Plan:
    settings = [("method.sync_every", "10"), ("method.sync_every", "100")]
    settings += [("method.sync_every", "500"), ("wire.format", "fp32"), ("wire.format", "int8")]
    found = candidates(["ddp", "diloco"], settings, CLUSTER)
    workload = Workload(parameters=1e7, tokens_per_sample=256, noise_scale=None)
    target = Target(
        name="loss 2.5", tokens=budget, loss=loss_after, assumptions=("The law holds.",)
    )
    return make_plan(found, workload, CLUSTER, target)


@pytest.fixture(scope="module")
def folder(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "a plan"
    assert write_plan(plan, path) == path / "plan.html"
    return path


def drawn(plan: Plan) -> dict[str, Any]:
    """The numbers of the page's curves, as the page has them."""
    chart = plan_curves(plan).charts[0]
    numbers: dict[str, Any] = json.loads(json.dumps(chart.numbers))
    return numbers


def curves_of(numbers: dict[str, Any], axis: str, measure: str) -> dict[str, list[Any]]:
    """(x, y) of what is shown on two axes, by name and detail."""
    return {
        f"{curve['name']} {curve['detail']}".strip(): list(
            zip(curve["axes"][axis], curve["measures"][measure], strict=True)
        )
        for curve in numbers["curves"]
        if axis in curve["axes"] and measure in curve["measures"]
    }


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (None, "-"),
        ((0.998, 1.001), "< 1%"),
        ((0.96, 1.001), "-4% to +0%"),
        ((0.9, 1.3), "-10% to +30%"),
        ((0.9, 12.0), "-10% to x12"),
        ((0.9, math.inf), "-10% to no limit"),
    ],
)
def test_the_range_of_a_prediction(
    plan: Plan, spread: tuple[float, float] | None, text: str
) -> None:
    assert range_text(replace(plan.chosen, spread=spread)) == text


def test_the_json_has_the_whole_plan(plan: Plan, folder: Path) -> None:
    content = json.loads((folder / "plan.json").read_text())
    assert content["target"] == "loss 2.5" and content["assumptions"] == list(plan.assumptions)
    assert content["cluster"]["bandwidth"] == "100mbit" and content["workload"]["parameters"] == 1e7
    assert len(content["predictions"]) == len(plan.predictions) == 7
    for row, one in zip(content["predictions"], plan.predictions, strict=True):
        assert row["settings"] == dict(one.candidate.settings)
        assert row["round_computing_seconds"] == one.round.computing
        for name in ("batch", "tokens", "inner_steps", "syncs", "bytes_sent", "seconds", "price"):
            number = getattr(one, name)
            assert row[name] == (number if math.isfinite(number) else None)
        assert row["loss"] == loss_after(one.candidate.recipe, 0, 0)
    advice = content["advice"]
    assert advice["chosen"] in content["predictions"]
    assert advice["chosen"]["label"] == plan.chosen.candidate.label
    assert advice["reasons"] == list(plan.reasons)
    assert advice["crossing_bits_per_second"] == plan.crossing is not None
    assert advice["pareto"] == [one.candidate.label for one in pareto(plan.predictions)]
    over = content["over_bandwidth"]
    assert over["bits_per_second"] == list(BANDWIDTHS)
    for name, found in plan.over_bandwidth.items():
        assert [row["seconds"] for row in over["methods"][name]] == [one.seconds for one in found]


def test_the_csv_has_a_row_for_each_candidate(plan: Plan, folder: Path) -> None:
    rows = list(csv.DictReader((folder / "plan.csv").read_text().splitlines()))
    found = zip(rows, plan.predictions, strict=True)
    for row, one in found:
        settings = dict(one.candidate.settings)
        assert row["method"] == one.candidate.name
        assert row["method.sync_every"] == settings.get("method.sync_every", "")
        assert row["bytes_sent"] == (str(one.bytes_sent) if one.reachable else "")
        assert row["seconds"] == (str(one.seconds) if one.reachable else "")
        assert float(row["utilisation"]) == one.round.utilisation
        assert row["recommended"] == str(int(one is plan.chosen))
        assert row["pareto"] == str(int(one in pareto(plan.predictions)))
    assert [row["seconds"] for row in rows].count("") == 2, "H = 500 in both formats"


def test_the_recipe_trains_the_recommendation_to_its_tokens(plan: Plan, folder: Path) -> None:
    chosen = plan.chosen
    text = (folder / "recipe.toml").read_text()
    assert f"# {plan.reasons[0]}\n" in text
    read = build_recipe(read_values(str(folder / "recipe.toml")))
    assert read.run.tokens == chosen.tokens
    recipe = chosen.candidate.recipe
    assert read == replace(recipe, run=replace(recipe.run, tokens=read.run.tokens))
    assert read.learning_rate.total_tokens == 0, "the rate falls with the new budget"


def test_the_page_opens_offline_and_says_all(plan: Plan, folder: Path) -> None:
    page = (folder / "plan.html").read_text()
    packed = r'<script type="text/plain".*?</script>|base64,[A-Za-z0-9+/=]+'
    own = re.sub(packed, "", page, flags=re.S)
    assert "http" not in own and "src=" not in own.replace('src="data:', "")
    numbers = json.loads(re.search(r'class="chart-numbers">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert numbers == drawn(plan)
    text = html.unescape(re.sub(r"<[^>]*>", "", own))
    assert "Target: loss 2.5." in text and "10M parameters" in text
    assert "Cluster: islands 4, bandwidth 100mbit, samples_per_second {8: 16.0}" in text
    assert f"Recommended: {plan.chosen.candidate.label}" in text
    assert f"adloco train '{folder}/recipe.toml'" in text
    for sentence in (*plan.reasons, *plan.assumptions, crossing_text(plan)):
        assert sentence in text
    for one in plan.predictions:
        assert text.count(one.candidate.label) > 0
    assert (folder / "plan.png").stat().st_size > 10_000


def test_the_table_has_the_best_of_each_method(plan: Plan) -> None:
    table = best_table(plan)
    rows = [dict(zip(table.columns, (c.text for c in row), strict=True)) for row in table.rows]
    best = by_method(plan.predictions)
    assert [row["candidate"] for row in rows] == [one.candidate.label for one in best.values()]
    ddp = rows[0]
    # 1.025e8 tokens of 256 in batches of 8; a ring of 4 sends 1.5 x 40 MB in each step.
    assert (ddp["tokens"], ddp["steps"], ddp["syncs"]) == ("102M", "50k", "50k")
    assert (ddp["sent"], ddp["loss"]) == ("3 TB", "2.0010")
    (one,) = (one for one in plan.predictions if one.candidate.name == "ddp")
    assert ddp["time"] == f"{one.seconds / 86400:.3g} d"
    assert ddp["price"] == f"{4 * 2 * one.seconds / 3600:.0f}"


def test_curves_against_bandwidth(plan: Plan) -> None:
    numbers = drawn(plan)
    assert numbers["log"] == {"x": True, "y": True}
    assert [axis["name"] for axis in numbers["axes"]] == ["bandwidth", "seconds"]
    shown = curves_of(numbers, "bandwidth", "seconds")
    for name, found in plan.over_bandwidth.items():
        line = zip(BANDWIDTHS, (one.seconds for one in found), strict=True)
        assert shown.pop(name) == list(line)
    link, crossing = shown.values()
    times = [one.seconds for found in plan.over_bandwidth.values() for one in found]
    assert link == [(1e8, min(times)), (1e8, max(times))]
    assert {bandwidth for bandwidth, _ in crossing} == {plan.crossing}
    assert set(curves_of(numbers, "bandwidth", "price")) > {"ddp", "diloco"}
    assert not curves_of(numbers, "bandwidth", "loss"), "it does not depend on the link"


@pytest.mark.parametrize("measure", ["bytes_sent", "tokens", "loss"])
def test_candidates_over_their_time(plan: Plan, measure: str) -> None:
    def place(one: Prediction) -> tuple[float, float]:
        return one.seconds, getattr(one, measure)

    shown = curves_of(drawn(plan), "seconds", measure)
    assert sorted(shown["ddp"] + shown["diloco"]) == sorted(
        place(one) for one in plan.predictions if one.reachable
    )
    assert shown["recommended"] == [place(plan.chosen)]
    assert shown["Pareto front"] == [place(one) for one in pareto(plan.predictions)]


def test_without_price_and_loss_there_is_nothing_of_them(plan: Plan) -> None:
    without = [replace(one, loss=None) for one in plan.predictions]
    chosen = replace(plan.chosen, loss=None)
    bare = replace(
        plan, predictions=without, chosen=chosen, cluster=replace(CLUSTER, price_per_hour=0.0)
    )
    numbers = drawn(bare)
    assert [axis["name"] for axis in numbers["axes"]] == ["bandwidth", "seconds"]
    measures = [measure["name"] for measure in numbers["measures"]]
    assert measures == ["seconds", "bytes_sent", "tokens"]
    assert best_table(bare).columns[-1] == "memory"


def test_times_without_bound_are_not_drawn(plan: Plan) -> None:
    endless = [replace(one, seconds=1e300) for one in plan.over_bandwidth["ddp"]]
    numbers = drawn(replace(plan, over_bandwidth=plan.over_bandwidth | {"ddp": endless}))
    assert curves_of(numbers, "bandwidth", "seconds")["ddp"] == []
    nothing = dict.fromkeys(plan.over_bandwidth, endless)
    drawn(replace(plan, over_bandwidth=nothing))


def test_the_picture_marks_the_link_and_the_crossing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(
        "adloco.report.pictures.save_figure", lambda figure, path: kept.append(figure)
    )
    (chart,) = plan_curves(plan).charts
    x, y = chart.axes["bandwidth"].unit.scale, chart.measures[0].unit.scale
    draw([(chart, "bandwidth", chart.measures[0])], "the target", tmp_path / "plan.png")
    (axis,) = kept[0].axes
    lines: dict[str, Any] = {}
    for line in axis.lines:
        points = [[at * x, value * y] for at, value in line.get_xydata().tolist()]  # type: ignore[union-attr]
        lines.setdefault(str(line.get_label()), []).append(points)
    assert axis.get_xscale() == axis.get_yscale() == "log"
    low, high = axis.get_ylim()
    assert sum(low <= tick <= high for tick in axis.get_yticks()) > 1, "the axis can be read"
    for name, found in plan.over_bandwidth.items():
        expected = [
            [bandwidth, one.seconds] for bandwidth, one in zip(BANDWIDTHS, found, strict=True)
        ]
        assert np.array(lines[name][0]) == pytest.approx(np.array(expected))
    assert lines["this link 100 Mbit/s"][0][0][0] == pytest.approx(1e8)
    (crossing,) = (points for name, (points, *_) in lines.items() if "as fast from" in name)
    assert crossing[0][0] == pytest.approx(plan.crossing)


def test_the_crossing_in_words(plan: Plan) -> None:
    at = replace(plan, crossing=2.5e9)
    assert crossing_text(at).startswith("From 2.5 Gbit/s on, data-parallel training is")
    assert crossing_text(replace(plan, crossing=math.inf)) == (
        "Data-parallel training is slower at every bandwidth."
    )
    assert crossing_text(replace(plan, crossing=None)) == ""
    assert crossing_text(replace(at, condition=" with batches of 8 samples only")).endswith(
        "as fast as all others with batches of 8 samples only."
    )


def test_the_cluster_in_words() -> None:
    given = replace(CLUSTER, pattern="all-to-all", speeds=(1.0, 1.0, 1.0, 0.5))
    assert cluster_words(given) == (
        "islands 4, bandwidth 100mbit, samples_per_second {8: 16.0}, pattern all-to-all, "
        "speeds (1.0, 1.0, 1.0, 0.5), price_per_hour 2.0"
    )


@pytest.mark.parametrize(
    ("value", "units", "expected"),
    [
        (0, BYTES, "0 B"),
        (0.25, TIMES, "0.25 s"),
        (90, TIMES, "1.5 min"),
        (141669.4, TIMES, "1.64 d"),
        (8.85433e9, BYTES, "8.85 GB"),
        (999.9e12, BYTES, "1,000 TB"),
        (1e8, RATES, "100 Mbit/s"),
        (3e9, COUNTS, "3B"),
        (64, COUNTS, "64"),
        (1e300, TIMES, "over 1e6 y"),
        (math.inf, TIMES, "-"),
    ],
)
def test_quantities_are_readable(value: float, units: dict[str, float], expected: str) -> None:
    assert readable(value, units) == expected
