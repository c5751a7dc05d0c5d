"""The charts of a run as PNG: which files, and what is drawn in them."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from adloco.cli.main import main
from adloco.metrics import ROUND, TRAINER
from adloco.report.curves import Chart, Curve, Panel
from adloco.report.pictures import draw_comparison, draw_run


def test_each_panel_is_a_picture(small: list[str], tmp_path: Path) -> None:
    assert main(["train", "diloco", *small, "--run.tokens", "1000"]) == 0
    folder = tmp_path / "run"
    assert main(["report", str(folder)]) == 0
    pictures = {path.stem: path.read_bytes() for path in (folder / "plots").iterdir()}
    assert pictures.keys() >= {"loss", "batch_of_each_trainer", "communication"}
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, tokens = ROUND["bytes_communicated"], ROUND["tokens"]

    def curve(look: Any, name: str, numbers: list[float | None]) -> Curve:
        return Curve(
            name=name, axes={"tokens": [1, 2, 3]}, measures={sent.name: numbers}, look=look
        )

    curves = [
        curve("line", "a", [1e6, None, 3e6]),
        curve("thin", "a", [2e6, 2e6, float("nan")]),
        curve("marks", "b", [None, None, None]),
        curve("line", "c", [None, 5e6, None]),
        curve("stairs", "d", [4e6, 6e6, None]),
    ]
    chart = Chart(axes={"tokens": tokens}, measures=[sent], curves=curves, marks={"tokens": [2]})
    drawn: list[Figure] = []
    monkeypatch.setattr(
        "adloco.report.pictures.save_figure", lambda figure, path: drawn.append(figure)
    )
    panel = Panel(title="What is sent", caption="", charts=[chart])
    assert draw_run([panel], tmp_path / "plots") == [tmp_path / "plots" / "what_is_sent.png"]
    (axes,) = drawn[0].axes
    one, thin, alone, stairs, merge = axes.get_lines()
    assert (list(one.get_xdata()), list(one.get_ydata())) == ([1, 3], [1, 3])  # in MB
    assert (list(thin.get_xdata()), list(thin.get_ydata())) == ([1, 2], [2, 2])
    assert thin.get_color() == one.get_color()
    assert list(merge.get_xdata()) == [2, 2]
    assert (list(alone.get_xdata()), alone.get_marker(), one.get_marker()) == ([2], "o", "None")
    assert (list(stairs.get_xdata()), list(stairs.get_ydata())) == ([0, 1, 2], [4, 4, 6])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["a", "c", "d"]
    legend = drawn[0].legends[0].get_lines()[0]
    assert legend.get_linewidth() == one.get_linewidth() > thin.get_linewidth()
    assert thin.get_zorder() < one.get_zorder(), "under the line"


@pytest.mark.parametrize(("least", "scale"), [(5e5, "linear"), (3e3, "log")])
def test_curves_that_end_far_apart_are_told_apart(
    least: float, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, loss = ROUND["bytes_communicated"], TRAINER["train_loss"]
    curves = [
        Curve(name=str(end), axes={sent.name: [0, end]}, measures={loss.name: [3.0, 2.0]})
        for end in (least, 1e6)
    ]
    drawn: list[Figure] = []
    monkeypatch.setattr(
        "adloco.report.pictures.save_figure", lambda figure, path: drawn.append(figure)
    )
    chart = Chart(axes={sent.name: sent}, measures=[loss], curves=curves)
    draw_comparison(chart, "", tmp_path)
    assert drawn[0].axes[0].get_xscale() == scale
