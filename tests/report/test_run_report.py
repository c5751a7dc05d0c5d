"""The page of one run shows what its records say."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from adloco.cli.main import main
from adloco.config.recipe_text import value_text
from adloco.metrics import PHASE, ROUND, SYNC, TRAINER, WORKER, Metric, Record, clipped_by
from adloco.report import page, panels
from adloco.report.curves import Chart, Curve, Panel
from adloco.report.drawing import save_figure
from adloco.report.loss_panel import loss_panel
from adloco.report.panels import run_panels
from adloco.run.records import Records
from adloco.tasks.kinds.classification_settings import ClassificationSettings
from adloco.tasks.kinds.language_model_settings import LanguageModelSettings


class Loaded(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def means(steps: list[Record], trainer: int) -> list[float]:
    """The loss of each step of a trainer, the mean over its workers' samples."""
    losses: dict[int, list[float]] = {}
    for step in steps:
        if step["trainer"] == trainer:
            of_step = [step["loss"]] * step["samples"]
            losses.setdefault(step["inner_step"], []).extend(of_step)
    return [sum(found) / len(found) for _, found in sorted(losses.items())]


def charts(page: str) -> list[dict[str, Any]]:
    """The numbers of all charts of a page."""
    return [
        json.loads(found) for found in re.findall(r'class="chart-numbers">(.*?)</script>', page)
    ]


def test_the_page_shows_the_records(small: list[str], tmp_path: Path) -> None:
    # One batch for all, so that a mean over samples is a plain mean.
    assert main(["train", "diloco", *small, "--run.tokens", "2500"]) == 0
    records, steps = Records(tmp_path / "run").read(), list(Records(tmp_path / "run").steps())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>diloco in run: adloco report</title>" in page
    loaded = Loaded()
    loaded.feed(page)
    assert not loaded.found, "the page opens offline"
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    for known in ("UTC", f"adloco {metadata.version('adloco')}", f"({about['cores']} cores)"):
        assert known in page
    changed, folded = page.split("<details>")[:2]
    assert "<code>run.tokens</code>" in changed and "<code>run.device</code>" in folded

    shown = charts(page)[0]
    axes = [axis["name"] for axis in shown["axes"]]
    assert axes == ["tokens", "inner_steps", "round", "syncs", "bytes_sent", "seconds"]
    labels = [measure["label"] for measure in shown["measures"]]
    assert labels == ["loss (nats per token)", "perplexity", "bits per byte"]
    validation, train, of_steps = shown["curves"]
    for axis in axes:
        assert validation["axes"][axis] == train["axes"][axis] == [r[axis] for r in records]
    assert validation["measures"]["val_loss"] == [record["val_loss"] for record in records]
    bits = [record["val_bits_per_byte"] for record in records]
    assert validation["measures"]["val_bits_per_byte"] == bits
    assert bits[-1] == pytest.approx(records[-1]["val_loss"] / math.log(2), rel=0.01), "of bytes"
    assert ">validation bits per byte</th>" in page and f">{bits[-1]:.3f}</td>" in page
    rounds = [record["train_loss"] for record in records]
    assert train["measures"]["val_loss"] == rounds
    assert train["measures"]["val_perplexity"] == [math.exp(loss) for loss in rounds]
    by_hand = means(steps, 0)
    assert of_steps["name"] == "steps of trainer 0"
    assert of_steps["measures"]["val_loss"] == pytest.approx(by_hand)
    assert of_steps["measures"]["val_perplexity"] == pytest.approx([math.exp(x) for x in by_hand])
    assert of_steps["axes"]["inner_steps"] == list(range(1, records[-1]["inner_steps"] + 1))
    # The last step of a round ends where the round does.
    ends = [of_steps["axes"]["tokens"][record["inner_steps"] - 1] for record in records]
    assert ends == [record["tokens"] for record in records]


def record(tokens: int, requested: int, trained: int) -> Record:
    trainer = {"trainer": 0, "requested_batch": requested, "trainer_batch": trained}
    trainer |= {"accumulation_steps": 1, "workers": 1, "val_loss": 2.0}
    worker = {"worker": 0, "trainer": 0, "worker_batch": trained, "wait_seconds": 0.0}
    counts = {"round": 1, "inner_steps": tokens, "tokens": tokens, "samples": tokens}
    counts |= {"bytes_communicated": 0, "bytes_inside": 0, "bytes_ddp_equivalent": 0}
    counts |= {"bytes_sent": 0, "syncs": 0}
    losses = {"val_loss": 2.0, "val_accuracy": 0.5, "train_loss": 2.0}
    parts = {"trainers": [trainer], "workers": [worker], "memory": {}, "merges": []}
    return {**counts, **losses, **parts, "seconds": 1.0, "sync": {"bytes": 0}}


def drawn(records: list[Record], measures: Sequence[Metric]) -> dict[str, Panel]:
    return {panel.title: panel for panel in run_panels(records, measures[0])}


def test_a_clipped_request_is_marked() -> None:
    # As requested; clipped from 20 to 16; and rounded up.
    records = [record(10, 8, 8), record(30, 20, 16), record(40, 3, 4)]
    panels = drawn(records, LanguageModelSettings.measures)
    requested, trained, _ = (chart.numbers for chart in panels["Batch of each trainer"].charts)
    assert requested["measures"][0]["whole"], "its axis has no fractions"
    (asked,), (used, clipped) = requested["curves"], trained["curves"]
    assert asked["measures"]["requested_batch"] == [8, 20, 3]
    assert used["measures"]["trainer_batch"] == [8, 16, 4]
    assert (clipped["name"], clipped["axes"]["tokens"]) == ("clipped", [30])
    assert clipped["measures"]["trainer_batch"] == [16]
    assert set(panels) == {"Batch of each trainer"}, "a single trainer and worker need no more"
    by = [clipped_by(line["trainers"][0], 20) for line in records]
    assert by == ["", "switch.max_micro_batch", ""]
    # One that is rounded up, for the ranks for instance, is not cut.
    for trained, why in ((20, "batch.maximum"), (21, "")):
        assert clipped_by({"requested_batch": 20, "trainer_batch": trained}, 20) == why
    assert clipped_by({"requested_batch": 20, "trainer_batch": 20}, None) == "", "as planned"


@pytest.mark.parametrize(
    ("metric", "panel"),
    [
        (TRAINER["rounded_up"], "batch"),
        (WORKER["busy_seconds"], "noise_scale"),
        (SYNC["transfer_seconds"], "communication"),
        (ROUND["tokens_per_second"], "wire"),
        (PHASE["peak_bytes"], "wire"),
        (TRAINER["requested_batch"], "memory"),
    ],
)
def test_every_metric_with_a_panel_is_shown(
    metric: Metric, panel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric that a panel does not draw by itself has a chart of its own there."""
    records = [record(10, 8, 8), record(30, 8, 8)]
    for line in records:
        line |= {"tokens_per_second": 7.0, "sync": {"bytes": 7.0, "transfer_seconds": 7.0}}
        line["memory"] = {"sync": {"peak_bytes": 7.0}}
        line["trainers"][0] |= {"rounded_up": 7, "requested_batch": 7}
        line["workers"][0] |= {"busy_seconds": 7.0}
    monkeypatch.setattr(panels, "METRICS", [replace(metric, panel=panel)])
    (chart,) = drawn(records, LanguageModelSettings.measures)[panels.CAPTIONS[panel][0]].charts
    (curve,) = [one for one in chart.curves if one.axes["tokens"]]
    assert curve.axes["tokens"] == [10, 30] and curve.measures == {metric.name: [7, 7]}


@pytest.mark.parametrize(("sent", "card"), [(1e6, "8 times less"), (6e6, None), (16e6, None)])
def test_what_is_said_beside_data_parallel_training(sent: float, card: str | None) -> None:
    """Nothing where a run has sent about as much, or more."""
    said = "beside data-parallel training with as many steps"
    last = record(10, 8, 8) | {"bytes_communicated": sent, "bytes_ddp_equivalent": 8e6}
    cards = dict(page.run_cards(LanguageModelSettings.measures, [last]))
    assert cards.get(said) == card


def test_a_merge_is_marked() -> None:
    merge = [{"survivor": 0, "absorbed": [1], "weights": {"0": 0.5, "1": 0.5}}]
    sent = {"bytes_sent": 7e6, "syncs": 1, "bytes_communicated": 7e6}
    records = [record(10, 8, 8), record(30, 8, 8) | {"merges": merge}, record(40, 8, 8) | sent]
    (chart,) = loss_panel(LanguageModelSettings.measures, records, {}).charts
    shown = chart.numbers
    assert shown["marks"]["tokens"] == [30]
    assert shown["curves"][0]["axes"]["bytes_sent"] == [0, 0, 7e6]


def test_a_classifier_has_no_perplexity_and_alone_sends_nothing() -> None:
    records = [record(10, 8, 8)]
    (chart,) = loss_panel(ClassificationSettings.measures, records, {}).charts
    assert [one["label"] for one in chart.numbers["measures"]] == [
        "loss (nats per text)",
        "accuracy",
    ]
    axes = ["tokens", "inner_steps", "round", "seconds"]
    assert [axis["name"] for axis in chart.numbers["axes"]] == axes


def test_a_picture_replaces_a_link(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    picture.symlink_to(tmp_path / "precious")
    save_figure(Figure(figsize=(1, 1)), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "precious").exists()


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    def shown(count: int) -> dict[str, Any]:
        losses: list[float | None] = [2.0 + at % 7 for at in range(count)]
        losses[5], losses[count // 2], losses[count // 2 + 1] = None, 99.0, -1.0
        axes = {"tokens": [*range(count)]}
        curve = Curve(name="a", axes=axes, measures={"train_loss": losses}, notes=["b"] * count)
        chart = Chart(axes={}, measures=[ROUND["train_loss"]], curves=[curve])
        (found,) = chart.numbers["curves"]
        assert found["measures"]["train_loss"] == [losses[at] for at in found["axes"]["tokens"]]
        assert len(found["notes"]) == len(found["axes"]["tokens"])
        return found

    assert shown(4000)["axes"]["tokens"] == [*range(4000)]
    long = shown(40_000)
    assert {0, 20_000, 20_001, 39_999} <= {*long["axes"]["tokens"]}
    assert 1900 < len(long["axes"]["tokens"]) < 2100


def test_the_legend_has_the_line_and_not_its_uncertainty() -> None:
    records = [record(10, 8, 8), record(30, 8, 8)]
    for line in records:
        known = {"noise_scale": 5.0, "noise_scale_factor": 2.0}
        statistics = dict.fromkeys(TRAINER, None) | {"grad_variance": 1.0, "grad_norm_sq": 1.0}
        line["trainers"][0] = statistics | line["trainers"][0] | known
    panel = drawn(records, LanguageModelSettings.measures)["Gradient statistics"]
    line, below, above = panel.charts[-1].curves
    assert [one.look for one in (line, below, above)] == ["line", "thin", "thin"]
    assert [one.measures["noise_scale"][0] for one in (line, below, above)] == [5.0, 2.5, 10.0]


def test_settings_are_shown_as_they_are_given(small: list[str], tmp_path: Path) -> None:
    words = ["train", "diloco", *small, "--run.tokens", "1000", "--run.deterministic"]
    assert main(words) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    cells = dict(re.findall(r"<td><code>([\w.]+)</code></td><td><code>(.*?)</code>", page))
    assert cells["run.deterministic"] == "true"
    assert "<code>False</code>" not in page and "<code>True</code>" not in page


def test_a_value_is_text_as_in_a_recipe() -> None:
    assert value_text({"width": 8, "bias": True}) == "{ width = 8, bias = true }"
    assert [value_text(value) for value in ("a b", False, 0.5, ["a"])] == [
        "a b",
        "false",
        "0.5",
        '["a"]',
    ]
