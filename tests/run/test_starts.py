"""Starts and stops of runs: what is lost at an interruption, and what is not."""

import errno
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adloco.cli.main import main
from adloco.cli.run_text import interruptions_text
from adloco.cli.view import LiveView
from adloco.errors import RunWarning
from adloco.report.interruptions import interruption_table
from adloco.run import starts
from adloco.run.checkpoint import newest
from adloco.run.part_file import read_part
from adloco.run.starts import Point, Start, Starts, failure_cost, read_starts, start_after
from adloco.run.training_run import TrainingRun
from tests.run.test_training_run import lines, make_run

BEGUN = Start(kind="begin", time=1000.0, round=0, tokens=0, seconds=0.0)


def point(round: int, tokens: int, seconds: float) -> Point:
    return Point(round=round, tokens=tokens, seconds=seconds)


def lost(start: Start) -> tuple[bool, int, float, float]:
    return start.failed, start.tokens_repeated, start.seconds_repeated, start.seconds_down


def test_what_a_kill_costs() -> None:
    """The run begins at 1000, saves after 40 s (round 4), ends round 6 after 60 s, and dies at some
    moment. At 1100 a process continues from round 4: 20 s are trained again, and 40 s are gone,
    with what was trained of round 7. It ends round 9 after 90 s, which is at 1100 + 50, and dies
    before its first checkpoint. At 1170 another continues from round 4: 50 s are trained again, and
    20 s are gone.
    """
    at = point(4, 400, 40.0)
    first = start_after([BEGUN], "resume", at, point(6, 600, 60.0), 1100.0)
    assert lost(first) == (True, 200, 20.0, 40.0)
    second = start_after([BEGUN, first], "resume", at, point(9, 900, 90.0), 1170.0)
    assert lost(second) == (True, 500, 50.0, 20.0)
    # By 1230 the run has 60 s more. All 230 s on the wall are either counted or lost.
    assert [*failure_cost([BEGUN, first, second], 100.0).values()] == [2, 700, 130.0, 100 / 230]
    assert interruptions_text([BEGUN, first, second], 100.0) == (
        "interrupted 2 times: 700 tokens repeated, 130.0 s lost, goodput 43.5%"
    )


def test_what_a_kill_within_a_round_costs() -> None:
    """No record tells how far the first round had come, but its 33 s are gone."""
    died = start_after([BEGUN], "resume", point(0, 0, 0.0), point(0, 0, 0.0), 1033.0)
    assert lost(died) == (True, 0, 0.0, 33.0)


def test_a_pause_is_not_lost() -> None:
    """Ctrl+C after 25 s, within round 3; the process continues a day later."""
    here = point(2, 250, 25.0)
    stop = start_after([BEGUN], "stop", here, here, 1026.0)
    assert lost(stop) == (False, 0, 0.0, 0.0)
    resumed = start_after([BEGUN, stop], "resume", here, point(2, 200, 20.0), 1026.0 + 86400)
    assert lost(resumed) == (False, 0, 0.0, 86400.0)
    assert failure_cost([BEGUN, stop, resumed], 25.0)["goodput"] == 1.0
    assert interruptions_text([BEGUN, stop, resumed], 25.0) == ""
    assert failure_cost([BEGUN], 0.0)["goodput"] == 1.0
    # What was saved at the stop is damaged: 15 s since the checkpoint before are trained again.
    older = start_after(
        [BEGUN, stop], "resume", point(1, 100, 10.0), point(2, 200, 20.0), 1026.0 + 86400
    )
    assert lost(older) == (False, 150, 15.0, 86400.0)
    after = failure_cost([BEGUN, stop, older], 25.0)
    assert [*after.values()][:3] == [1, 150, 15.0]


def test_what_a_stop_costs_where_workers_are_dropped() -> None:
    """Of 250 tokens at the stop, 20 are of workers that are dropped. If the checkpoint of the stop
    is damaged, and that before has 10 of them, what came between is trained again.
    """
    reached = point(2, 250, 25.0)
    starts = [BEGUN, start_after([BEGUN], "stop", reached, reached, 1026.0)]
    resumed = start_after(starts, "resume", point(2, 230, 24.0), point(2, 200, 20.0), 1030.0, 20)
    assert lost(resumed) == (False, 0, 0.0, 4.0) and resumed.tokens == 230
    older = start_after(starts, "resume", point(2, 215, 22.0), point(2, 200, 20.0), 1030.0, 10)
    assert lost(older) == (False, 25, 3.0, 4.0)


def test_what_ranks_lose_that_regroup_in_place() -> None:
    """Round 3 began after 20 s. A rank fails after 26 s, when 50 tokens of it were trained, and
    the others continue 4 s later; a rank that joins costs nothing.
    """
    regrouped = start_after([BEGUN], "regroup", point(2, 200, 20.0), point(2, 250, 26.0), 1030.0)
    assert lost(regrouped) == (True, 50, 6.0, 4.0)
    # The clock continued from 20 s at 1030, so that it shows 35 s at 1045.
    here = point(3, 350, 35.0)
    joined = start_after([BEGUN, regrouped], "join", here, here, 1045.0)
    assert lost(joined) == (False, 0, 0.0, 0.0)
    assert failure_cost([BEGUN, regrouped, joined], 35.0)["seconds_lost"] == 10.0


def test_a_failure_before_a_rewind_is_counted() -> None:
    """The run begins at 1000, ends round 6 after 60 s, and fails. At 1070 somebody takes it back to
    round 4, and resumes it at 1075. The 20 s of training that are given up are not lost.
    """
    at, reached = point(4, 400, 40.0), point(6, 600, 60.0)
    back = start_after([BEGUN], "rewind", at, reached, 1070.0)
    assert lost(back) == (True, 0, 0.0, 10.0)
    resumed = start_after([BEGUN, back], "resume", at, at, 1075.0)
    assert lost(resumed) == (False, 0, 0.0, 5.0)
    starts = [BEGUN, back, resumed]
    assert [*failure_cost(starts, 90.0).values()] == [1, 0, 10.0, 0.9]
    table = [row[0].text for row in interruption_table(starts).rows]
    assert table == ["taken back after a failure", "resumed after a stop"]
    # Neither a second rewind nor one after a stop is a failure.
    assert lost(start_after([BEGUN, back], "rewind", at, at, 1075.0)) == (False, 0, 0.0, 5.0)
    stop = start_after([BEGUN], "stop", reached, reached, 1060.0)
    back = start_after([BEGUN, stop], "rewind", at, reached, 1070.0)
    assert lost(back) == (False, 0, 0.0, 10.0)
    # Its pause counts in the table all the same.
    resumed = start_after([BEGUN, stop, back], "resume", at, at, 1075.0)
    rows = interruption_table([BEGUN, stop, back, resumed]).rows
    assert [(row[0].text, row[-1].text) for row in rows] == [
        ("taken back after a stop", "10 s"),
        ("resumed after a stop", "5 s"),
    ]


@pytest.mark.parametrize(("reached", "failed", "repeated"), [(400, False, 0), (600, True, 200)])
def test_without_a_line_before_no_time_is_known(reached: int, failed: bool, repeated: int) -> None:
    start = start_after([], "resume", point(4, 400, 40.0), point(6, reached, 60.0), 1100.0)
    assert lost(start) == (failed, repeated, 20.0 * failed, 0.0)
    back = start_after([], "rewind", point(4, 400, 40.0), point(6, reached, 60.0), 1100.0)
    assert lost(back) == (False, 0, 0.0, 0.0)


def test_clocks_of_machines_may_differ() -> None:
    start = start_after([BEGUN], "resume", point(4, 400, 40.0), point(4, 400, 40.0), 900.0)
    assert lost(start) == (True, 0, 0.0, 0.0)
    behind = start_after([BEGUN], "resume", point(4, 400, 40.0), point(5, 500, 39.9), 1039.9)
    assert lost(behind) == (True, 100, 0.0, 0.0)


def test_a_run_that_died_and_one_that_was_stopped(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies after round 3, with a checkpoint of round 2, and is stopped within round 4."""
    folder = tmp_path / "run"
    words = [*small, "--run.rounds", "4", "--run.checkpoint_every", "2"]
    run = make_run("single", words)
    records = list(itertools.islice(run.rounds(), 2))
    records += itertools.islice(run.rounds(), 1)  # In the same process, so that nothing is lost.
    assert records[2]["seconds"] > records[1]["seconds"]
    saved = read_part(newest(folder / "checkpoints"), "run")["run"]["seconds"]

    run = TrainingRun.resume(folder)
    rounds, passes = run.rounds(), itertools.count(1)
    view, console = LiveView(run), Console(width=140, record=True)
    console.print(view.render())
    assert "interrupted" not in console.export_text()
    view.show(next(rounds))
    console.print(view.render())
    repeated = records[2]["tokens"] - records[1]["tokens"]
    assert f"interrupted once: {repeated:,} tokens repeated, " in console.export_text()
    run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 2 else None
    )
    assert list(rounds) == []

    assert main(["train", "--resume", str(folder)]) == 0
    assert f"interrupted once: {repeated:,} tokens repeated, " in capsys.readouterr().out
    begin, died, stop, paused, end = read_starts(folder)
    assert [start.kind for start in (begin, died, stop, paused, end)] == [
        "begin",
        "resume",
        "stop",
        "resume",
        "stop",
    ]
    assert (died.failed, died.round, died.tokens) == (True, 2, records[1]["tokens"])
    assert died.seconds == pytest.approx(saved, abs=0.001)
    assert died.tokens_repeated == repeated
    assert died.seconds_repeated == pytest.approx(records[2]["seconds"] - saved, abs=0.002)
    # What is not counted of the time on the wall is lost.
    elapsed, counted = died.time - begin.time, died.seconds - begin.seconds
    assert died.seconds_lost == pytest.approx(elapsed - counted, abs=0.005)
    assert not paused.failed and paused.tokens == stop.tokens > stop.round * repeated
    assert paused.seconds_down == pytest.approx(paused.time - stop.time, abs=0.002)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interruptions"] == 1
    assert summary["tokens_repeated"] == repeated
    assert summary["seconds_lost"] == pytest.approx(died.seconds_lost)
    whole = summary["seconds"] + died.seconds_lost
    assert summary["goodput"] == pytest.approx(summary["seconds"] / whole)
    page = (folder / "report.html").read_text()
    assert page.count("resumed after a failure") == page.count("resumed after a stop") == 1
    assert f"tokens repeated</span><b>{repeated:,}</b>" in page


def test_what_dropped_workers_had_trained_is_not_repeated(small: list[str], tmp_path: Path) -> None:
    """The run is stopped within round 2 by the last of three workers, which train one after
    another, and resumed without the first.
    """
    folder, passes = tmp_path / "run", itertools.count(1)
    words = [*small, "--run.rounds", "3", "--method.workers_per_trainer", "3"]
    run = make_run("diloco", [*words, "--run.threads", "1"])
    rounds = run.rounds()
    next(rounds)
    run.algorithm.workers[2].model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 2 else None
    )
    assert list(rounds) == []
    assert main(["train", "--resume", str(folder), "--method.dropped", "[0]"]) == 0
    _, stop, resumed, _ = read_starts(folder)
    assert resumed.round == stop.round == 1 and resumed.tokens < stop.tokens
    assert lost(resumed)[:3] == (False, 0, 0.0)
    assert json.loads((folder / "summary.json").read_text())["interruptions"] == 0


def test_a_run_that_is_left_alone_has_lost_nothing(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "single", *small, "--run.rounds", "1"]) == 0
    assert "interrupted" not in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["interruptions"], summary["seconds_lost"], summary["goodput"]) == (0, 0, 1)
    assert "Interruptions" not in (tmp_path / "run" / "report.html").read_text()
    assert [line["kind"] for line in lines(tmp_path / "run" / "starts.jsonl")] == ["begin", "stop"]
    # Without the file it still continues and reports.
    (tmp_path / "run" / "starts.jsonl").unlink()
    assert main(["train", "--resume", str(tmp_path / "run"), "--run.rounds", "2"]) == 0
    went_on, _ = read_starts(tmp_path / "run")
    assert (went_on.kind, went_on.round, went_on.interrupted) == ("resume", 1, False)


GOOD = json.dumps(vars(BEGUN))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "no JSON"),
        ("[]", "no object"),
        (GOOD.replace("begin", "began"), "kind"),
        (GOOD.replace("1000.0", "1e30"), "time"),
        (GOOD.replace("1000.0", "NaN"), "time"),
        (GOOD.replace('"failed": false', '"failed": 3'), "failed"),
        (GOOD.replace('"tokens": 0', '"tokens": -1'), "tokens"),
    ],
)
def test_damage_is_named(line: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(
        ValueError, match=rf"^line 2 of .*starts.jsonl is damaged \({what}\); restore the file from"
    ):
        read_starts(tmp_path)


def test_a_damaged_file_changes_nothing_else(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    rounds = make_run("single", [*small, "--run.checkpoint_every", "9"]).rounds()
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    (folder / "starts.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["train", "--resume"], ["report"]):
        assert main([*command, str(folder)]) == 2
        assert capsys.readouterr().err == (
            f"adloco: line 1 of {folder / 'starts.jsonl'} is damaged (kind); restore the file from "
            "a copy\n"
        )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


HERE = point(0, 0, 0.0)


def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text(f"{GOOD}\n")
    (tmp_path / "starts.jsonl").symlink_to(precious)
    Starts(tmp_path, writes=True).stop(HERE)
    assert precious.read_text() == f"{GOOD}\n"
    assert not (tmp_path / "starts.jsonl").is_symlink()
    assert [line.kind for line in read_starts(tmp_path)] == ["begin", "stop"]


def test_without_room_a_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(starts, "write_text", full)
    kept = Starts(tmp_path, writes=True)
    with pytest.warns(RunWarning, match=r"starts.jsonl cannot be written \(No space left on"):
        kept.begin(HERE)
    assert [line.kind for line in kept.lines] == ["begin"]
