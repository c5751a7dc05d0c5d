"""The live view and the plain lines, drawn from a real run."""

import io
import itertools
import os
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from adloco.cli import live_view, opening
from adloco.cli.closing import closing_lines
from adloco.cli.live_view import SPARKLINE_COLUMNS, LiveView, sparkline
from adloco.cli.main import main
from adloco.cli.opening import joined_line, opening_lines
from adloco.cli.run_text import clock
from adloco.cli.terminal import say
from adloco.cli.view import open_view, print_round
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.launch.launcher import speaks_for_machine
from adloco.report.page import PAGE, write_report
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.run.run_progress import Progress
from adloco.run.trained import text_sample
from adloco.run.training_run import TrainingRun


@pytest.fixture
def run(small: list[str]) -> TrainingRun:
    words = shlex.split(
        "--run.tokens 16000 --batch.initial 8 --batch.minimum 8 --switch.multiplier 2 "
        "--merge.first_round 2 --wire.format int4"
    )
    settings, _ = take_settings([*small, *words])
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
        "4 clipped",
        "noise scale: the batch in which",
        "micro x steps: samples at once",
        "1 (merged)",
        "learning rate",
        "bpb",
        "; best ",
        "round 2: trainer 1 merged into trainer 0",
        "0 syncs, ",
        ": data-parallel training would have sent ",
    ):
        assert part in text, part
    narrow = Console(width=80, record=True)
    narrow.print(view.render())
    header, _, rows = narrow.export_text().partition(" workers │\n")
    assert "requested" in header and rows.count(" 1 │\n") == 2


def test_a_round_may_end_while_the_live_view_is_drawn(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich draws it in a thread of its own, here while the first of two events is drawn."""
    merge = {"absorbed": [1], "survivor": 0, "weights": {"0": 0.5, "1": 0.5}}
    record = next(run.rounds()) | {"merges": [merge, merge]}
    view, drawn = LiveView(run), 0
    view.show(record)

    class Slow(Text):
        def __init__(self, text: str = "", style: str = "", **options: Any) -> None:
            nonlocal drawn
            super().__init__(text, style, **options)
            drawn += "merged into" in text
            if "merged into" in text and drawn == 1:
                view.show(record)

    monkeypatch.setattr(live_view, "Text", Slow)
    view.render()
    assert drawn == 2


def test_what_the_live_view_compares_and_foresees(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data-parallel training would have sent 8 MB, eight times the 1 MB that was sent; the last
    inner step has gone beyond the budget.
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
            seconds=100.0,
            part=1.0,
            budget="16,400 / 16,000 tokens",
            inner_step=3,
            round_steps=4,
        ),
    )
    console.print(view.render())
    text = console.export_text()
    less = (
        "8 times less than the 8.0 MB that data-parallel training would have sent for as many steps"
    )
    assert f"1 sync, 1.0 MB sent per worker: {less}" in text
    assert "round 2, inner step 3 of 4" in text
    assert "16,400 / 16,000 tokens   1:40 gone, 0:00 left" in text
    assert "2,000 rows read" in text


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
    for record in run.rounds():
        print_round(console, run, record, [])
    lines = console.export_text().splitlines()
    merges = sum(len(record["merges"]) for record in run.records.read())
    assert len(lines) == len(run.records.read()) + merges
    assert all("tok/s" in line or "merged into" in line for line in lines)
    # A run that was resumed is several processes, each with a peak of its own.
    first, *others = run.records.read()
    closing = closing_lines(run, run.finish(), [first | {"memory_bytes": 2**50}, *others])
    assert "evaluation and checkpoints, 1,073,741,824 MiB of memory at most" in closing[1]
    assert f"{merges} merge" in closing[2]
    assert "samples requested" in closing[2] and "used" in closing[2]
    assert f"  {tmp_path / 'run' / 'report.html'}" in closing
    assert closing[-2:] == [
        f"  adloco generate {tmp_path / 'run'} --prompt 'Some text'",
        f"  adloco compare {tmp_path / 'run'} OTHER_RUN_OR_RECIPE",
    ]


def test_what_was_trained_is_shown_where_it_is_not_what_was_requested(small: list[str]) -> None:
    """Four trainers of one worker, each with four samples, merge: 4 workers take two each."""
    batch = ["--batch.initial", "4", "--batch.minimum", "4", "--batch.maximum", "4"]
    merge = ["--merge.count", "4", "--merge.first_round", "1"]
    settings, _ = take_settings([*small, "--method.num_trainers", "4", *merge, *batch])
    run = TrainingRun.create(build_recipe(override(read_values("adloco"), settings)))
    live, plain = LiveView(run), Console(width=140, record=True)
    for record in itertools.islice(run.rounds(), 2):
        print_round(plain, run, record, [])
        live.show(record)
    before, *_, after = plain.export_text().splitlines()
    assert "trainer 3: batch 4 of 1 worker in micro-batches of 4 x 1" in before
    assert "batch 4 (used 8) of 4 workers in micro-batches of 2 x 1" in after
    drawn = Console(width=140, record=True)
    drawn.print(live.render())
    assert re.search(r" 4 +8 +2 x 1", drawn.export_text())
    write_report(run.folder)
    page = (run.folder / PAGE).read_text()
    assert "batch as trained" in page
    assert '<td class="number">4 / 4 / 4 / 4</td><td class="number">4 / 4 / 4 / 4</td>' in page
    assert '<td class="number">4</td><td class="number">8</td>' in page


def test_a_round_of_a_wire_format_stays_one_line(small: list[str]) -> None:
    words = ["--run.tokens", "16000", "--wire.format", "int8"]
    words += ["--streaming.fragments", "2", "--streaming.tau", "1"]
    settings, _ = take_settings([*small, *words])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    plain, live = Console(width=200, record=True), Console(width=200, record=True)
    living = LiveView(run)
    for record in run.rounds():
        print_round(plain, run, record, [])
        living.show(record)
    lines = plain.export_text().splitlines()
    assert len(lines) == len(run.records.read())
    # Four bytes become one, and each block of 256 has four more: 1024 / 260 = 3.94, less what pads
    # the last block of each tensor.
    ratio = run.newest["sync"]["compression_ratio"]
    assert 3.5 < ratio < 1024 / 260
    assert all(f"(int8, {ratio:.1f}x; data-parallel " in line for line in lines)
    live.print(living.render())
    assert (
        f"sent per worker (int8, {ratio:.1f}x): 15 times less than the 6.3 MB that data-parallel"
        in " ".join(live.export_text().split())
    )
    assert (
        f"sent per worker in 16 syncs (int8, {ratio:.1f}x): 15 times less"
        in closing_lines(run, run.finish(), run.records.read())[3]
    )


def test_a_terminal_gets_the_live_view_and_a_pipe_plain_lines(run: TrainingRun) -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    with open_view(run, Console(file=terminal, force_terminal=True, width=120)):
        pass
    assert "first round running" in terminal.getvalue()
    with open_view(run, Console(file=pipe)) as show:
        assert pipe.getvalue() == ""
        show(next(run.rounds()), [])
    assert pipe.getvalue().startswith("round    1 ")


def test_a_terminal_without_cursor_or_utf8_gets_plain_lines(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["train", "diloco", *small, "--run.tokens", "2048"]) == 0
    lines = terminal.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]
    assert [line[:12] for line in lines if line.startswith("round ")] == [
        "round    1  ",
        "round    2  ",
    ]


@pytest.mark.parametrize("why", ["Broken pipe", "No space left on device"])
def test_a_run_outlives_the_readers_of_what_it_says(
    why: str,
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in `adloco train | head -1`, and with a file on a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    if why.startswith("No"):
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(writer, "w") as end, monkeypatch.context() as lost:
        lost.setattr(sys, "stdout", end)
        assert main(["train", "diloco", *small]) == 0
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"adloco: standard output cannot be written ({why}); the run continues, and its train.log "
        "has what is said there"
    )
    assert (tmp_path / "run" / "report.html").exists()


def test_views_show_what_a_round_took_of_a_gpu(run: TrainingRun) -> None:
    live, console = LiveView(run), Console(width=400, record=True)
    record = next(run.rounds()) | {"mfu": 0.4217, "memory_bytes": 3 * 2**30}
    print_round(console, run, record, [])
    live.show(record)
    console.print(live.render())
    assert console.export_text().count(", 42.2% of the device's FLOPs, 3,072 MiB of memory") == 2


def test_the_opening_says_whether_a_gpu_runs_compiled_models(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.device = torch.device("cuda")
    monkeypatch.setattr(opening, "peak_flops", lambda device: 1e15)
    assert opening_lines(run)[0].endswith("; on cuda, not compiled (it is with run.compile true)")
    next(iter(run.algorithm.workers.values())).engine.compiles = True
    assert opening_lines(run)[0].endswith("; on cuda, compiled")
    monkeypatch.setattr(opening, "peak_flops", lambda device: None)
    assert "not known" in opening_lines(run)[0]


def test_a_notebook_gets_one_display(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Display:
        def update(self, page: str) -> None:
            shown.append(page)

    def display(page: str, *, display_id: bool) -> Display:
        assert display_id, "it can be updated"
        handle = Display()
        handle.update(page)
        return handle

    notebook = types.ModuleType("IPython.display")
    vars(notebook).update(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    console = Console(force_jupyter=True, width=100)
    with open_view(run, console) as show:
        show(next(run.rounds()), [])
    begun, after = shown
    assert "first round running" in begun and "requested" in after


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], ""),
        ([2.0], "▁"),
        ([3.0, 3.0], "▁▁"),
        ([7.0, None, 0.0, float("nan"), 3.0], "█▁▄"),
        # Two means: (9 + 7) / 2 and (1 + 1) / 2 of each half.
        ([9.0] * SPARKLINE_COLUMNS + [1.0] * SPARKLINE_COLUMNS, "█" * 16 + "▁" * 16),
    ],
)
def test_sparklines(numbers: list[float | None], expected: str) -> None:
    assert sparkline(numbers) == expected


def test_what_a_run_says_before_its_first_round(run: TrainingRun, small: list[str]) -> None:
    """16,000 tokens in steps of 2 trainers with 4 samples of 32 tokens: 62.5 steps, 4 a round."""
    lines = opening_lines(run)
    text = run.task.num_train_samples(0) * 32
    parameters = run.algorithm.num_parameters
    assert lines[0].startswith(f"{parameters:,} parameters; 2 trainers of 1 worker; on cpu")
    assert f"16,000 tokens ({16_000 / text:,.2g} epochs over {text:,} tokens of text)" in lines[1]
    # Two trainers become one, which takes half of the samples a round: 16 rounds are no limit.
    assert lines[1].endswith(
        "16 rounds of 4 inner steps; more after a merge, fewer if the batch grows, more if it falls"
    )
    tokens = run.recipe.run
    run.recipe = replace(run.recipe, run=replace(tokens, rounds=9))
    assert opening_lines(run)[1].endswith(
        "9 rounds, 9 rounds of 4 inner steps; fewer if the batch grows"
    )
    longer = replace(run.recipe.method, sync_growth=1.0)
    run.recipe = replace(run.recipe, run=tokens, method=longer)
    assert opening_lines(run)[1].endswith(
        "16 rounds of 4 inner steps; more after a merge, fewer because rounds become longer"
    )
    # int4: 4 bits for each of 128 values, and a scale of 4 bytes.
    each = parameters * (64 + 4) / 128
    assert lines[2].endswith(
        "no parameters are sent until trainers merge; from then on a sync sends "
        f"{each / 1e3:.3g} kB per worker; each merge sends more"
    )
    assert lines[3].startswith("each trainer trains a model of its own, until several merge")
    assert lines[4].startswith("the batch follows the gradient")
    settings, _ = take_settings([*small, "--run.folder", f"{run.folder}-diloco"])
    plain = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    assert len(opening_lines(plain)) == 3
    run.algorithm.trainers[0].worker_ids = [0, 1]  # As after a merge, or from 3 after a failure.
    del run.algorithm.trainers[1]
    lines = opening_lines(run)
    assert "; 1 trainer of 2 workers; on" in lines[0]
    assert lines[2].startswith("a sync sends ") and "merge" not in lines[2]
    rounds = int(lines[1].rpartition(", ")[2].split()[0])
    assert lines[2].endswith(f" kB per worker, about {rounds * each / 1e6:,.1f} MB in all")
    assert "has joined the run in" in joined_line(run) and "workers 0, 1 of 2" in joined_line(run)


@pytest.mark.parametrize(
    "rule", ["constant", "ramp --batch.first 8 --batch.last 4 --batch.over_samples 99"]
)
def test_all_that_a_run_will_send(rule: str, small: list[str]) -> None:
    """8 syncs with 1 bit per value and a magnitude of 2 bytes per block. A batch that can fall
    makes more syncs, and blocks that are not full and numbers beside the parameters add to all.
    """
    words = f"--run.tokens 8192 --wire.format int1 --model.hidden_size 256 --batch.rule {rule}"
    settings, _ = take_settings([*small, *words.split()])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    megabytes = 8 * (256 / 8 + 2) / 256 * run.algorithm.num_parameters / 1e6
    sent = opening_lines(run)[2]
    assert sent.endswith(f" kB per worker, about {megabytes:,.1f} MB in all")


@pytest.mark.parametrize(
    ("limits", "rounds"),
    [
        # 128 samples in 16 steps of 8. The last step of 129 takes the one that is left as well.
        ("--run.tokens 4096", 4),
        ("--run.tokens 4128", 4),
        ("--run.tokens 4096 --run.syncs 3", 3),
        ("--run.tokens 4096 --run.inner_steps 9", 3),
        ("--run.tokens 4096 --run.rounds 2", 2),
    ],
)
def test_rounds_that_are_left_are_those_that_come(
    limits: str, rounds: int, small: list[str]
) -> None:
    """Of 4 inner steps each, with 4 bits for each of 128 values, and a scale of 4 bytes."""
    words = f"{limits} --wire.format int4 --batch.rule constant"
    words += " --method.sync_every 4 --batch.initial 8"
    settings, _ = take_settings([*small, *words.split()])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), settings)))
    each = run.algorithm.num_parameters * (64 + 4) / 128
    first = opening_lines(run)
    assert first[1].endswith(f", {rounds} rounds of 4 inner steps")
    assert first[2].endswith(f"about {rounds * each / 1e3:.3g} kB in all")
    next(training := run.rounds())
    later = opening_lines(run)
    assert f", {rounds - 1} more round" in later[1]
    assert later[2].endswith(f"about {(rounds - 1) * each / 1e3:.3g} kB more")
    assert len([*training]) == rounds - 1
    run.recipe = replace(run.recipe, method=replace(run.recipe.method, sync_growth=1.0))
    assert "at most" in opening_lines(run)[2]


def test_trainers_of_one_worker_that_never_merge_send_nothing(run: TrainingRun) -> None:
    run.recipe = replace(run.recipe, merge=NoMerge())
    assert opening_lines(run)[2].startswith("no parameters are sent: each trainer has one worker")


def test_the_sample_is_the_same_each_time_and_leaves_random_numbers_alone(
    run: TrainingRun,
) -> None:
    assert text_sample(run) is None, "nothing is trained"
    for _ in itertools.islice(run.rounds(), 1):
        before = torch.get_rng_state()
        sample = text_sample(run)
        assert sample is not None and sample == text_sample(run)
        assert torch.equal(torch.get_rng_state(), before)
        assert sample["prompt"] and sample["text"]
        assert run.task.tokenizer.encode([sample["prompt"]])[0]


def test_lines_end_between_words_and_paths_stay_whole() -> None:
    path = "/a/long/path" * 12
    out = io.StringIO()
    text = f"the report is in {path} and these are more words than fit on one line of a terminal"
    say(Console(file=out, force_terminal=True, width=60, highlight=False), text)
    lines = out.getvalue().splitlines()
    assert len(lines) > 2 and any(path in line for line in lines)
    assert " ".join(out.getvalue().split()) == text
    pipe = io.StringIO()
    say(Console(file=pipe, width=60), text)
    assert pipe.getvalue() == f"{text}\n"


def test_clocks_have_hours_when_they_need_them() -> None:
    assert [clock(s) for s in (None, 0, 61, 3600, 7384)] == [
        "-:--",
        "0:00",
        "1:01",
        "1:00:00",
        "2:03:04",
    ]


@pytest.mark.parametrize(
    ("rank", "local_rank", "speaks"), [("0", "0", False), ("1", "1", False), ("2", "0", True)]
)
def test_each_other_machine_has_one_rank_that_speaks(
    rank: str, local_rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert speaks_for_machine() is speaks
