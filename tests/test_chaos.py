"""benchmarks/chaos.py: its schedule, and that each of its checks finds what it is for."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco.run.part_file import write_part
from benchmarks.chaos_checks import Fault, Outcome, RunFiles, problems, schedule

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "chaos.py"
KINDS = {"one": ["kill", "damage"], "ranks": ["kill", "stop", "term"]}
KINDS_CUT = ("cut", "long-cut")


def test_a_seed_decides_the_schedule() -> None:
    faults = schedule(KINDS, 20, seed=1)
    assert faults == schedule(KINDS, 20, seed=1)
    assert faults != schedule(KINDS, 20, seed=2)
    for mode, kinds in KINDS.items():
        for kind in kinds:
            assert sum(fault.kind == kind for fault in faults[mode]) == 4
        rounds = [fault.round for fault in faults[mode]]
        assert rounds == sorted({*rounds})
    assert min(fault.round for fault in faults["one"] if fault.kind == "damage") >= 2


def test_a_long_cut_lasts_a_minute() -> None:
    faults = schedule({"disks": ["cut", "long-cut"]}, 8, seed=1)["disks"]
    lasting = {
        kind: [fault.seconds for fault in faults if fault.kind == kind] for kind in KINDS_CUT
    }
    assert lasting["long-cut"] == [60] * 4
    assert max(lasting["cut"]) < 12


def outcome(kind: str, *, passes: bool = False) -> Outcome:
    """A fault in round 5 of a run that two processes train."""
    fault = Fault(kind=kind, round=4, delay=0.1, victim=0, seconds=1)
    return Outcome(
        fault=fault, struck=10.0, recorded=4, trained_by=frozenset({1, 2}), passes=passes
    )


def test_a_run_goes_on_with_the_first_round_begun_after_the_fault() -> None:
    killed = outcome("kill")
    assert not killed.see(5, frozenset({2}), 10.1), "a survivor completes the round of the fault"
    assert killed.recovery is None
    assert killed.see(5, frozenset({3, 4}), 17.0)
    assert killed.recovery == 7
    assert not killed.see(6, frozenset({3, 4}), 18.0)
    assert killed.recovery == 7
    assert outcome("kill").see(6, frozenset({2}), 11.0), "in place, by those that are left"
    orphans = outcome("launcher")
    assert not orphans.see(6, frozenset({1, 2}), 11.0)
    waited = outcome("cut", passes=True)
    assert not waited.see(5, frozenset({1, 2}), 10.1)
    assert waited.see(6, frozenset({1, 2}), 12.0)


def test_goals_are_in_place_and_by_a_restart() -> None:
    """A round of 0.6 s and 5 s in place, 10 s more until silence is noticed; 60 s by a restart."""
    for kind, trained_by, in_place, goal in (
        ("kill", {2, 3}, True, 5.6),
        ("stop", {2, 3}, True, 15.6),
        ("kill", {3, 4}, False, 60),
        ("stop", {3, 4}, False, 60),
    ):
        one = outcome(kind)
        assert one.see(6, frozenset(trained_by), 10 + goal - 0.1)
        assert (one.in_place, one.goal, one.late) == (in_place, goal, False)
        one.recovery = goal + 0.1
        assert one.late
    waited = outcome("cut", passes=True)
    assert waited.see(6, frozenset({1, 2}), 12.0)
    assert waited.goal == 6.6, "it passes after a second"
    early = outcome("stop")
    early.recorded = 0
    assert early.goal == 90 + 60, "it has not met the others, who wait run.timeout_seconds for it"


def test_a_long_cut_is_over_once_all_machines_train() -> None:
    """Within a minute of its end, as by a restart."""
    long = outcome("long-cut", passes=True)
    assert long.see(6, frozenset({1}), 12.0), "in place, by the machine that is left"
    assert not long.over
    for together, late in ((60.0, False), (60.1, True)):
        long.together = together
        assert (long.over, long.late) == (True, late)
    short = outcome("cut", passes=True)
    assert short.see(6, frozenset({1}), 12.0)
    assert short.over, "the next fault may come while a machine is away"


def test_more_than_a_round_is_repeated() -> None:
    for kind, allowed in (("kill", 1), ("damage", 2)):
        cost = outcome(kind)
        cost.repeated = allowed
        assert not cost.too_many_repeated
        cost.repeated += 1
        assert cost.too_many_repeated
    full = outcome("disk", passes=True)
    full.repeated, full.on_full_disk = 3, 2
    assert not full.too_many_repeated
    full.on_full_disk = 1
    assert full.too_many_repeated


def record(round: int) -> dict[str, Any]:
    return {
        "round": round,
        "tokens": 32 * 8 * round,
        "samples": 8 * round,
        "inner_steps": round,
        "syncs": round,
        "learning_rate": 0.1,
        "merges": [],
        "trainers": [{"trainer": 0, "workers": 2, "requested_batch": 8, "trainer_batch": 8}],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three rounds, of one inner step of two workers each."""
    run = tmp_path / "run"
    run.mkdir()
    lines = {
        "metrics": [record(round) for round in (1, 2, 3)],
        "steps": [
            {"round": round, "trainer": 0, "worker": worker, "inner_step": round, "samples": 4}
            for round in (1, 2, 3)
            for worker in (0, 1)
        ],
    }
    for name, content in lines.items():
        text = "".join(json.dumps(line) + "\n" for line in content)
        (run / f"{name}.jsonl").write_text(text)
    checkpoint = run / "checkpoints" / "round-000003-step-00000003"
    checkpoint.mkdir(parents=True)
    write_part(checkpoint, "trainer-0", {"params": torch.ones(2)})
    write_part(checkpoint, "run", {"rng": torch.ones(1)})
    (tmp_path / "cache").mkdir()
    return run


def read(folder: Path) -> RunFiles:
    return RunFiles.read([folder], folder.parent / "cache")


def test_a_run_is_as_it_was_without_faults(folder: Path) -> None:
    undisturbed = read(folder)
    assert list(undisturbed.tensors) == ["trainer-0.params"]
    # Which checkpoints are kept depends on the faults.
    (folder / "checkpoints" / "damaged-round-000001-step-00000001").mkdir()
    assert problems(read(folder), undisturbed) == []


def test_machines_with_a_disk_each_have_one_history(folder: Path, tmp_path: Path) -> None:
    """Rank 0 went to the other machine after round 1, and round 2 was recorded on both."""
    undisturbed, other = read(folder), tmp_path / "other" / "run"
    shutil.copytree(folder, other)
    (other / "summary.json").touch()
    for name, lines in (("metrics", undisturbed.records), ("steps", undisturbed.steps)):
        for run, kept in ((folder, (1, 2)), (other, (2, 3))):
            text = "".join(json.dumps(line) + "\n" for line in lines if line["round"] in kept)
            (run / f"{name}.jsonl").write_text(text)
    # What only the machine without the end has is not looked at.
    shutil.rmtree(folder / "checkpoints")
    found = RunFiles.read([folder, other], tmp_path / "cache")
    assert problems(found, undisturbed) == ["summary.json is left over"]
    (folder / "metrics.jsonl").unlink()
    found = RunFiles.read([folder, other], tmp_path / "cache")
    assert "round 1 is recorded 0 times" in problems(found, undisturbed)


def test_a_round_is_missing_or_repeated(folder: Path) -> None:
    run = read(folder)
    one, two, three = run.records
    for records, problem in (
        ([one, three], "round 2 is recorded 0 times"),
        ([one, two], "round 3 is recorded 0 times"),
        ([one, two, two, three], "round 2 is recorded 2 times"),
        ([one, two, three, record(4)], "round 4 is recorded 1 times"),
        ([two, one, three], "round 1 is recorded after round 2"),
    ):
        assert problem in problems(replace(run, records=records), run)


def test_a_sample_is_missing_or_counted_twice(folder: Path) -> None:
    run = read(folder)
    assert problems(replace(run, steps=run.steps[:-1]), run) == [
        "round 3 counts 8 samples, but its steps have 4"
    ]
    twice = problems(replace(run, steps=[*run.steps, run.steps[0]]), run)
    assert twice == [
        "inner step {'round': 1, 'trainer': 0, 'worker': 0, 'inner_step': 1} is recorded 2 times",
        "round 1 counts 8 samples, but its steps have 12",
    ]


def test_a_decision_differs(folder: Path) -> None:
    run = read(folder)
    trainer = run.records[1]["trainers"][0] | {"requested_batch": 9}
    other = [run.records[0], run.records[1] | {"trainers": [trainer]}, run.records[2]]
    assert problems(replace(run, records=other), run) == [
        "requested_batch of round 2 is [9], and [8] without faults"
    ]
    merged = [*run.records[:2], run.records[2] | {"merges": [{"survivor": 0}]}]
    assert problems(replace(run, records=merged), run) == [
        "merges of round 3 is [{'survivor': 0}], and [] without faults"
    ]


def test_a_parameter_differs_in_its_last_bit(folder: Path) -> None:
    run = read(folder)
    changed = torch.tensor([1.0, 1.0 + 2**-23])
    assert problems(replace(run, tensors={"trainer-0.params": changed}), run) == [
        "1 of 1 tensors differ, the first is trainer-0.params"
    ]
    assert problems(replace(run, tensors={}), run) == ["only one run has trainer-0.params"]


@pytest.mark.parametrize(
    "left",
    ["run/.other", "run/checkpoints/.writing-a", "run/checkpoints/.replaced-b", "cache/.new"],
)
def test_a_file_is_left_over(left: str, folder: Path) -> None:
    undisturbed = read(folder)
    (folder.parent / left).touch()
    name = left.partition("/")[2]
    assert problems(read(folder), undisturbed) == [f"{name} is left over"]
    (folder.parent / left).unlink()
    (folder / "report.html").touch()
    assert problems(undisturbed, read(folder)) == ["report.html is missing"]


@pytest.fixture
def chaos(tmp_path: Path) -> list[str]:
    words = ["--modes", "one", "--kinds", "kill", "--faults", "1", "--out", str(tmp_path / "chaos")]
    return [sys.executable, str(PROGRAM), *words]


@pytest.mark.nightly
def test_a_killed_run_goes_on(chaos: list[str], tmp_path: Path) -> None:
    done = subprocess.run(chaos, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 2:
        pytest.skip(f"private namespaces are not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| one | kill | 1 of 1 |" in done.stdout
    assert "| one | as without faults |" in (tmp_path / "chaos.md").read_text()
    assert len((tmp_path / "chaos.csv").read_text().splitlines()) == 2


def of_this_benchmark(word: str) -> list[str]:
    """Processes whose environment has this word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:  # It has ended meanwhile.
            continue
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_of_it(number: signal.Signals, chaos: list[str], tmp_path: Path) -> None:
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the ip command")
    mark = f"CHAOS_TEST={tmp_path}"
    mounts = Path("/proc/mounts").read_text()
    with subprocess.Popen(
        chaos, env=os.environ | {"CHAOS_TEST": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        if not program.stdout.readline():
            pytest.skip("private namespaces are not permitted here")
        deadline = time.monotonic() + 60
        while len(of_this_benchmark(mark)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(of_this_benchmark(mark)) >= 3  # Itself, process 1, and the run.
        program.send_signal(number)
    while of_this_benchmark(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not of_this_benchmark(mark)
    assert Path("/proc/mounts").read_text() == mounts


def test_the_nightly_job_has_each_kind_of_fault_once_in_each_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    modes = import_module("chaos").MODES
    workflow = PROGRAM.parents[1] / ".github" / "workflows" / "nightly.yml"
    faults = sum(len(mode.kinds) for mode in modes.values())
    assert f"benchmarks/chaos.py --faults {faults} " in workflow.read_text()
    planned = schedule({name: list(mode.kinds) for name, mode in modes.items()}, faults, seed=0)
    assert all(len(planned[name]) == len(mode.kinds) for name, mode in modes.items())
