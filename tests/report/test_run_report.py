"""The figures of one run show what its records say."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from adloco.cli.main import main
from adloco.metrics import Record
from adloco.report.drawing import save_figure
from adloco.report.plots import draw_plots
from adloco.report.step_losses import step_losses
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
    """The loss of each step of a trainer, a plain mean over its workers."""
    losses: dict[int, list[float]] = {}
    for step in steps:
        if step["trainer"] == trainer:
            losses.setdefault(step["inner_step"], []).append(step["loss"])
    return [sum(found) / len(found) for _, found in sorted(losses.items())]


@pytest.mark.pictures
def test_the_page_and_the_pictures_show_the_records(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> None:
        drawn[path.stem] = figure
        path.touch()

    monkeypatch.setattr("adloco.report.plots.save_figure", keep)
    # One batch for all, so that a mean over samples is a plain mean.
    assert main(["train", "diloco", *small, "--run.tokens", "2500"]) == 0
    records, steps = Records(tmp_path / "run").read(), list(Records(tmp_path / "run").steps())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>diloco in run: adloco report</title>" in page
    loaded = Loaded()
    loaded.feed(page)
    assert loaded.found and all(found.startswith("data:") for found in loaded.found)

    (numbers,) = re.findall(r'id="curve-numbers">(.*?)</script>', page)
    shown = json.loads(numbers)
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

    tokens, inner_steps, _, sent = drawn["loss"].axes
    light, of_rounds, evaluated = inner_steps.lines
    assert list(light.get_ydata()) == pytest.approx(by_hand)
    assert list(of_rounds.get_ydata()) == rounds
    assert list(evaluated.get_xdata()) == [record["inner_steps"] for record in records]
    assert len(tokens.lines) == 3 and len(sent.lines) == 2, "steps have no bytes of their own"
    assert sent.get_xlim()[0] < 0 < records[0]["bytes_communicated"] < sent.get_xlim()[1]
    (scale,) = inner_steps.child_axes
    assert scale.get_ylabel() == "perplexity"
    assert scale.yaxis.get_major_formatter()(math.log(12), 0) == "12"


def test_runs_of_earlier_versions_have_no_bits_per_byte(
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are reported, compared and resumed; the rounds after that have the number."""
    monkeypatch.setattr("adloco.report.compare_plots.draw_comparison", lambda *_: [])
    run, study = tmp_path / "run", tmp_path / "study"
    constant = ["--learning_rate.shape", "constant"]
    assert main(["train", "diloco", *small, "--run.tokens", "1000", *constant]) == 0
    lines = Records(run).read()
    for row in (row for line in lines for row in (line, *line["trainers"])):
        del row["val_bits_per_byte"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    recipe = (run / "recipe.toml").read_text()
    (other / "recipe.toml").write_text(recipe.replace("seed = 0", "seed = 1"))
    compare = ["compare", str(run), str(other), "--run.folder", str(study)]
    for words, page in (
        (["report", str(run)], run / "report.html"),
        (compare, study / "compare.html"),
    ):
        assert main(words) == 0
        text = page.read_text()
        assert "validation perplexity" in text and "bits per byte" not in text
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--run.tokens", "2000"]) == 0
    assert ", bpb " in capsys.readouterr().out
    assert "bits per byte" in (run / "report.html").read_text()
    found = [line.get("val_bits_per_byte") for line in Records(run).read()]
    assert found[0] is None and found[-1] > 0
    assert main([*compare, "--force"]) == 0
    assert "validation bits per byte" in (study / "compare.html").read_text()


def record(tokens: int, requested: int, trained: int) -> Record:
    trainer = {"trainer": 0, "requested_batch": requested, "trainer_batch": trained}
    trainer |= {"accumulation_steps": 1, "workers": 1, "val_loss": 2.0}
    worker = {"worker": 0, "trainer": 0, "worker_batch": trained, "wait_seconds": 0.0}
    counts = {"round": 1, "inner_steps": tokens, "tokens": tokens, "samples": tokens}
    counts |= {"bytes_communicated": 0, "bytes_inside": 0, "bytes_ddp_equivalent": 0}
    losses = {"val_loss": 2.0, "val_accuracy": 0.5, "train_loss": 2.0}
    parts = {"trainers": [trainer], "workers": [worker], "memory": {}, "merges": []}
    return {**counts, **losses, **parts, "seconds": 1.0, "sync": {"bytes": 0}}


def test_a_clipped_request_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(
        "adloco.report.plots.save_figure",
        lambda figure, path: drawn.update({path.stem: figure}),
    )
    # As requested; clipped from 20 to 16; and rounded up.
    records = [record(10, 8, 8), record(30, 20, 16), record(40, 3, 4)]
    draw_plots(records, step_losses(records, []), tmp_path, LanguageModelSettings.measures)
    requested, trained, _ = drawn["batch"].axes
    assert list(requested.lines[0].get_ydata())[1::2] == [8, 20, 3]
    assert list(trained.lines[0].get_ydata())[1::2] == [8, 16, 4]
    assert trained.lines[1].get_label() == "clipped"
    assert trained.lines[1].get_xydata().tolist() == [[30, 16]]
    assert requested.get_ylim() == trained.get_ylim(), "one scale, side by side"
    assert set(drawn) == {"loss", "batch"}, "a single trainer and worker need no more"


def test_a_classifier_has_no_perplexity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(
        "adloco.report.plots.save_figure",
        lambda figure, path: drawn.update({path.stem: figure}),
    )
    records = [record(10, 8, 8)]
    draw_plots(records, step_losses(records, []), tmp_path, ClassificationSettings.measures)
    assert set(drawn) == {"loss", "accuracy", "batch"}
    labels = [panel.get_xlabel() for panel in drawn["loss"].axes]
    assert labels == ["tokens", "inner steps", "time (s)"], "nothing is sent"
    assert not any(panel.child_axes for panel in drawn["loss"].axes)


def test_pictures_are_not_drawn_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "plots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="plots is a symbolic link, which a report does not"):
        draw_plots([], [], tmp_path / "plots", LanguageModelSettings().measures)
    picture = tmp_path / "loss.png"
    picture.symlink_to(tmp_path / "precious")
    save_figure(Figure(figsize=(1, 1)), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "precious").exists()
