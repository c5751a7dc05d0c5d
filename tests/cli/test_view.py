"""The live view and the plain lines, drawn from a real run."""

import io
import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from adloco.cli.arguments import take_settings
from adloco.cli.run_text import round_text, summary_lines
from adloco.cli.view import LiveView, PlainView, open_view
from adloco.config.recipe import build_recipe, override, read_values
from adloco.report.page import write_report
from adloco.run.training_run import Progress, TrainingRun


@pytest.fixture
def run(small: list[str]) -> TrainingRun:
    settings, _ = take_settings([*small, "--merge.first_round", "2"])
    return TrainingRun.create(build_recipe(override(read_values("adloco"), settings)))


def test_live_view_shows_what_happens(run: TrainingRun) -> None:
    view, console = LiveView(run), Console(width=140, force_terminal=False, record=True)
    console.print(view.render())
    assert "first round running" in console.export_text()
    for record in run.rounds():
        view.show(record)
        if record["round"] == 2:
            break
    console.print(view.render())
    text = console.export_text()
    for part in (
        "16,000 tokens",
        "tokens/s",
        "left",
        "requested batch",
        "noise scale",
        "1 (merged)",
        "round 2: trainer 1 merged into trainer 0",
        "DDP would have sent",
    ):
        assert part in text, part


def test_what_the_live_view_compares_and_foresees(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP would have sent 8 MB, eight times the 1 MB that was sent; the last inner step has gone
    beyond the budget.
    """
    record = next(run.rounds()) | {
        "syncs": 1,
        "bytes_communicated": 1e6,
        "bytes_ddp_equivalent": 8e6,
    }
    view, console = LiveView(run), Console(width=160, record=True)
    view.show(record)
    monkeypatch.setattr(
        run,
        "progress",
        lambda: Progress(
            tokens=16_400,
            rows=2_000,
            rows_per_second=19.6,
            seconds=100.0,
            part=1.0,
            budget="16,400 / 16,000 tokens",
        ),
    )
    console.print(view.render())
    text = console.export_text()
    assert "1.0 MB sent per worker; 8x less than the 8.0 MB that DDP would have sent" in text
    assert "16,400 / 16,000 tokens   1:40 gone, 0:00 left" in text
    assert "2,000 rows read, 20 rows/s" in text


def test_rows_of_a_stream_are_counted_from_where_the_process_began(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run has read 100 rows of the 600; the first round reads the other 500."""
    read = itertools.chain([100], itertools.repeat(600))
    monkeypatch.setattr(run.task, "rows_read", lambda: next(read))
    record = next(run.rounds())
    assert record["rows_read"] == 600
    assert record["rows_per_second"] * record["seconds"] == pytest.approx(500, rel=0.05)
    text = round_text(record, "int4", run.recipe.task.measures)
    assert text.endswith(f" tok/s  600 rows read, {record['rows_per_second']:,.0f} rows/s")


def test_ctrl_c_leaves_one_border(run: TrainingRun) -> None:
    """A terminal echoes ^C where its cursor stands; the next drawing takes the place of the one
    before.
    """
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=100, height=30)
    with Live(LiveView(run).render(), console=console, auto_refresh=False) as live:
        live.refresh()
        out.write("^C")
        live.refresh()
    lines = screen(out.getvalue(), 100)
    assert sum("╭" in line for line in lines) == sum("╰" in line for line in lines) == 1
    assert "^C" not in "".join(lines)


def screen(written: str, width: int) -> list[str]:
    """What a terminal shows. It wraps a line before the character after the last column, not behind
    the last column.
    """
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d?]*[A-Za-z]|[^\x1b]", written):
        if part == "\x1b[2K":
            rows[row] = ""
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):  # Others show and hide the cursor.
            if part == "\n" or column == width:
                row, column = row + 1, 0
                rows += [""] * (row == len(rows))
            if part != "\n":
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
                column += 1
    return rows


def test_plain_lines_and_summary(run: TrainingRun, tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    view = PlainView(console, "fp32", run.recipe.task.measures)
    for record in run.rounds():
        view.show(record)
    lines = console.export_text().splitlines()
    merges = sum(len(record["merges"]) for record in run.history)
    assert len(lines) == len(run.history) + merges
    assert all("tok/s" in line or "merged into" in line for line in lines)
    summary = summary_lines(run, run.finish())
    assert len(summary) == 7
    assert f"{merges} merges" in summary[2]
    assert str(tmp_path / "run" / "report.html") in summary[5]


def test_what_was_trained_is_shown_where_it_is_not_what_was_requested(small: list[str]) -> None:
    """Four trainers of one worker, each with four samples, merge: 4 workers take two each."""
    batch = ["--batch.initial", "4", "--batch.minimum", "4", "--batch.maximum", "4"]
    merge = ["--merge.count", "4", "--merge.first_round", "1"]
    settings, _ = take_settings([*small, "--method.num_trainers", "4", *merge, *batch])
    run = TrainingRun.create(build_recipe(override(read_values("adloco"), settings)))
    live, plain = LiveView(run), Console(width=140, record=True)
    for record in itertools.islice(run.rounds(), 2):
        PlainView(plain, "int4", run.recipe.task.measures).show(record)
        live.show(record)
    before, *_, after = plain.export_text().splitlines()
    assert "t3 batch 4 = 1w x 4x1" in before
    assert "batch 4 (8 trained) = 4w x 2x1" in after
    drawn = Console(width=140, record=True)
    drawn.print(live.render())
    assert "4 (8 trained)" in drawn.export_text()
    page = write_report(run.folder).read_text()
    assert "batch as trained" in page
    assert '<td class="number">4 / 4 / 4 / 4</td><td class="number">4 / 4 / 4 / 4</td>' in page
    assert '<td class="number">4</td><td class="number">8</td>' in page


def test_a_round_of_a_wire_format_stays_one_line(small: list[str]) -> None:
    settings, _ = take_settings(
        [*small, "--wire.format", "int8", "--streaming.fragments", "2", "--streaming.tau", "1"]
    )
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    plain, live = Console(width=200, record=True), Console(width=200, record=True)
    view, living = PlainView(plain, "int8", run.recipe.task.measures), LiveView(run)
    for record in run.rounds():
        view.show(record)
        living.show(record)
    lines = plain.export_text().splitlines()
    assert len(lines) == len(run.history)
    # Four bytes become one, and each block of 256 has four more: 1024 / 260 = 3.94, less what pads
    # the last block of each tensor.
    ratio = run.history[-1]["sync"]["compression_ratio"]
    assert 3.5 < ratio < 1024 / 260
    assert all(f"(int8, {ratio:.1f}x; DDP " in line for line in lines)
    live.print(living.render())
    assert (
        f"sent per worker, int8, {ratio:.1f}x; 12x less than the 6.3 MB that DDP would have sent"
        in " ".join(live.export_text().split())
    )
    assert f"sent per worker, int8, {ratio:.1f}x, " in summary_lines(run, run.finish())[3]


def test_a_terminal_gets_the_live_view_and_a_pipe_plain_lines(run: TrainingRun) -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    with open_view(run, Console(file=terminal, force_terminal=True, width=120)) as live:
        assert isinstance(live, LiveView)
    assert "first round running" in terminal.getvalue()
    with open_view(run, Console(file=pipe)) as plain:
        assert isinstance(plain, PlainView)
    assert pipe.getvalue() == ""
