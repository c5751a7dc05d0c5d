"""Ranks that recover in place after one of them has failed: `run.on_rank_failure = "replace"`."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from adloco.cli.main import main
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import Training
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.config.setting_words import take_settings
from adloco.distributed.launch.rank_store import Quorum
from adloco.distributed.testing import run_on_ranks
from adloco.elastic import regroup
from adloco.errors import RankFailureError
from adloco.run.changes import read_changes
from adloco.run.training_run import TrainingRun
from tests.conftest import wait_for
from tests.problems import without_timings
from tests.warm_python import children_of

ADLOCO = [sys.executable, "-m", "adloco"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run, without timings, and without the copies that only ranks send."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    numbers = [without_timings(json.loads(line)) for line in lines]
    return [{key: line[key] for key in line if key != "bytes_checkpoint"} for line in numbers]


def starts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def kinds(folder: Path) -> list[str]:
    return [start["kind"] for start in starts(folder)]


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_was_told_to_end_does_not_continue_after_a_failure(
    small: list[str], tmp_path: Path
) -> None:
    """torchrun tells the others to end when a rank is killed, and kills them later. They forgot it
    as they met, dropped its workers and trained on.
    """
    folder = tmp_path / "run"
    words = ["diloco", *small, "--run.folder", str(folder), "--ranks", "2"]
    words += ["--run.tokens", "100000000", "--run.on_rank_failure", "drop"]
    command = [*ADLOCO, "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (folder / "metrics.jsonl").exists(), process)
        first, second = children_of(process)
        os.kill(second, signal.SIGSTOP)  # So the first one waits for it, and cannot save.
        os.kill(first, signal.SIGTERM)
        time.sleep(0.5)
        os.kill(second, signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "told to stop by SIGTERM, but another rank failed, or did not come within" in error
    assert not read_changes(folder)


def interrupted_later(
    folder: Path, machines: Sequence[subprocess.Popen[str]]
) -> list[tuple[str, str]]:
    """Interrupt the launchers after two more rounds; returns what each has said."""
    rounds = len(metrics(folder))
    until(lambda: len(metrics(folder)) > rounds + 1, machines[0])
    for machine in machines:
        machine.send_signal(signal.SIGINT)
    return [machine.communicate(timeout=120) for machine in machines]


def train_and(
    words: list[str],
    folder: Path,
    disturb: Callable[[subprocess.Popen[str]], None],
    flags: Sequence[str] = ("--run.on_rank_failure", "replace", "--run.checkpoint_every", "1"),
) -> str:
    """Train without end, disturb the ranks after a round, stop after more rounds; return the
    errors.
    """
    endless = [*ADLOCO, "train", *words, *flags, "--run.tokens", "100000000"]
    process = subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(folder / "metrics.jsonl")
        disturb(process)
        rounds = len(metrics(folder))
        until(lambda: len(metrics(folder)) > rounds + 1, process)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "stopped and saved" in output
    return error


def assert_undisturbed(words: list[str], folder: Path, whole: Path) -> None:
    """One process that trains as many rounds has the same numbers."""
    count = str(len(metrics(folder)))
    alone = [*words, "--run.folder", str(whole), "--run.rounds", count]
    assert main(["train", *alone, "--run.tokens", "100000000"]) == 0
    # The last round of a run is evaluated, whichever it is.
    assert metrics(folder)[:-1] == metrics(whole)[:-1]
    assert [line["round"] for line in metrics(folder)] == [*range(1, int(count) + 1)]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
@pytest.mark.usefixtures("warm_python")
def test_the_others_take_over_the_workers_of_a_killed_rank(
    device: str, small: list[str], tmp_path: Path
) -> None:
    """The one that writes is killed; the other has its state in memory, and continues with it. Two
    ranks share a GPU.
    """
    folder, words = tmp_path / "run", ["adloco", *small, "--evaluation.every", "100"]
    words += ["--run.device", device]
    memory = ["--run.on_rank_failure", "replace", "--run.copy_every", "1"]
    memory += ["--run.checkpoint_every", "1000"]

    def kill(process: subprocess.Popen[str]) -> None:
        until(lambda: len(metrics(folder)) > 1, process)  # So round 1 has been copied.
        os.kill(children_of(process)[0], signal.SIGKILL)
        until(lambda: "regroup" in kinds(folder), process)

    train_and([*words, "--ranks", "2"], folder, kill, memory)
    assert kinds(folder) == ["begin", "regroup", "stop"]
    assert starts(folder)[1]["round"] >= 1, "only the first checkpoint was on disk"
    assert_undisturbed(words, folder, tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_python")
def test_the_others_continue_without_the_workers_of_a_failed_rank(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told so on the line, or by the failure itself: the same numbers."""
    folder, words = tmp_path / "run", ["diloco", *small, "--evaluation.every", "100"]
    words += ["--method.workers_per_trainer", "3"]

    def kill(process: subprocess.Popen[str]) -> None:
        until(lambda: len(metrics(folder)) > 1, process)
        os.kill(children_of(process)[1], signal.SIGKILL)
        until(lambda: "regroup" in kinds(folder), process)

    drop = [
        "--run.on_rank_failure",
        "drop",
        "--run.copy_every",
        "1",
        "--run.checkpoint_every",
        "1000",
    ]
    train_and([*words, "--ranks", "3"], folder, kill, drop)
    (change,) = read_changes(folder)
    assert (change.setting, change.before, change.after) == ("method.dropped", "()", "(1,)")
    assert change.round >= 1, "only the first checkpoint was on disk"
    ours, after = metrics(folder), change.round
    assert [line["trainers"][0]["workers"] for line in ours[after - 1 : after + 1]] == [3, 2]
    whole = ["--run.folder", str(tmp_path / "whole"), "--run.tokens", "100000000"]
    assert main(["train", *words, *whole, "--run.rounds", str(after)]) == 0
    resumed = ["--resume", str(tmp_path / "whole"), "--run.rounds", str(len(ours))]
    assert main(["train", *resumed, "--method.dropped", "[1]"]) == 0
    theirs = metrics(tmp_path / "whole")
    for name in ("train_loss", "trainers", "samples"):
        found = [[line[name] for line in lines[after:-1]] for lines in (ours, theirs)]
        assert found[0] == found[1]
    capsys.readouterr()
    assert main(["train", "--resume", str(folder), "--method.dropped", "[]"]) == 2
    assert "method.dropped may only grow on resume, and the run in" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("returns", "secret"),
    [
        (False, True),
        pytest.param(True, True, marks=pytest.mark.nightly),
        pytest.param(True, False, marks=pytest.mark.nightly),
    ],
)
def test_machines_whose_launchers_meet(
    returns: bool,
    secret: bool,
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of them is killed, with its launcher, and comes back by the same command; another one,
    with another secret, takes no part.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    folder = tmp_path / "run"
    words = ["diloco", *small, "--evaluation.every", "1000", "--method.workers_per_trainer", "4"]
    endless = [*ADLOCO, "train", *words, "--restart", "--ranks", "2", "--machines", "2"]
    endless += ["--meet", f"127.0.0.1:{port}", "--run.tokens", "100000000"]
    endless += ["--run.on_rank_failure", "replace", "--run.checkpoint_every", "1"]

    files = [tmp_path / "secret", tmp_path / "another"]
    for file in files:
        file.touch(mode=0o600)
        file.write_text(file.name.ljust(16, "."))
    if secret:
        endless += ["--run.secret_file", str(files[0])]

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(endless, stdout=pipe, stderr=pipe, text=True)

    machines = [start()]
    try:
        # Before the other one tries: the first to come keeps the store.
        until(lambda: listens(port), machines[0])
        if secret:
            assert main([*endless[3:], "--run.secret_file", str(files[1])]) == 2
            said = capsys.readouterr().err
            assert f"the machine at 127.0.0.1:{port} has another secret than this one" in said
        machines.append(start())
        until((folder / "metrics.jsonl").exists, machines[0])
        if returns:
            for process in [machines[1].pid, *children_of(machines[1])]:
                os.kill(process, signal.SIGKILL)
            until(lambda: "regroup" in kinds(folder), machines[0])
            machines[1].communicate()
            machines[1] = start()
            until(lambda: "join" in kinds(folder), machines[0])
        said = interrupted_later(folder, machines)
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [130, 130], said
    assert "stopped and saved" in said[0][0] and "joined the run" in said[1][0]
    assert not secret or files[0].read_bytes() not in contents(folder)
    assert_undisturbed(words, folder, tmp_path / "whole")


def contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def listens(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "signals", "extra"),
    [
        (3, [signal.SIGSTOP], ["--run.silent_seconds", "4"]),
        (3, [signal.SIGTERM], ["--run.copy_every", "2"]),
        (3, [signal.SIGKILL, signal.SIGKILL], ["--restart"]),
        (4, [signal.SIGKILL], ["--restart", "--placement.shard_size", "2"]),
        pytest.param(
            4,
            [signal.SIGKILL],
            ["--restart", "--placement.shard_size", "2", "--run.device", "cuda"],
            marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
        ),
    ],
)
def test_failed_ranks_return(
    ranks: int, signals: list[int], extra: list[str], small: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ["diloco", *small, "--evaluation.every", "1000", "--method.workers_per_trainer", "4"]

    def is_back(starts_before: int, regroups_of_all_before: int) -> bool:
        """Its successor has joined, or was so fast that it was at the others' meeting."""
        return "join" in kinds(folder)[starts_before:] or regroups_of_all() > regroups_of_all_before

    def regroups_of_all() -> int:
        return (folder / "train.log").read_text().count(f"; {ranks} ranks continue after round")

    def disturb(process: subprocess.Popen[str]) -> None:
        files = Path(f"/proc/{children_of(process)[0]}/fd")
        open_before = len([*files.iterdir()])
        for number in signals:
            done, met = len(kinds(folder)), regroups_of_all()
            os.kill(children_of(process)[1], number)
            until(lambda done=done: "regroup" in kinds(folder)[done:], process)
            if "--restart" in extra:
                until(lambda done=done, met=met: is_back(done, met), process)
                # The connections of the groups that were left are closed.
                until(lambda: len([*files.iterdir()]) <= open_before, process)

    train_and([*words, "--ranks", str(ranks), *extra], folder, disturb)
    if "--placement.shard_size" not in extra:  # Shards round otherwise than one process.
        assert_undisturbed(words, folder, tmp_path / "whole")


def test_a_store_that_is_gone_is_told_of_where_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while the failure before is handled, whose message would lack how to resume."""

    def gone(quorum: Quorum) -> None:
        raise RankFailureError("the process that started the ranks ended")

    monkeypatch.setattr(regroup, "come", gone)
    part = regroup.Regrouping(build_recipe({}), Quorum(members=(0, 1), process=0), None)
    part.folder, part.recovers = Path("run"), True
    assert part.failed(RankFailureError("rank 1 was ended by signal 9"))
    with pytest.raises(RankFailureError, match="that started the ranks ended"):
        part.meet()


def trained_until_others_come(words: list[str]) -> int | None:
    """The exit code of a rank in a run of two, when others have come to join after its first
    round; the second rank is told to stop in that moment.
    """
    settings, _ = take_settings(words)
    recipe = build_recipe(override(read_values("diloco"), settings))
    rank = dist.get_rank()
    run = TrainingRun.create(recipe)
    part = regroup.Regrouping(recipe, Quorum(members=(0, 1), process=rank), None)
    part.recovers = True
    part.opened(run)

    def others_wait() -> bool:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    part.others_wait = others_wait  # type: ignore[method-assign]
    with train_log(run) as log:
        console = Console(file=io.StringIO())
        return Training(run=run, console=console, log=log, regrouping=part).train([])


def test_a_rank_that_is_told_to_leave_as_others_join(small: list[str]) -> None:
    """All ranks take the same way then; else they would wait for each other."""
    replace = [*small, "--run.on_rank_failure", "replace"]
    assert run_on_ranks(trained_until_others_come, 2, replace) == [None, 130]


def dropping(
    monkeypatch: pytest.MonkeyPatch, *after: tuple[int, ...], shards: int = 1
) -> regroup.Regrouping:
    """The part of process 3 in a run with four workers that drops those that failed.

    Args:
        monkeypatch: Sets who meets.
        after: The members of each quorum after the first one, of processes 0 to 3.
        shards: Ranks of an island.
    """
    found = [Quorum(number=at, members=each, process=3) for at, each in enumerate(after, start=1)]
    monkeypatch.setattr(regroup, "come", lambda quorum: None)
    monkeypatch.setattr(regroup, "next_quorum", lambda *given: found.pop(0))
    monkeypatch.setattr(regroup, "broadcast_state", lambda state: state)
    method = {"workers_per_trainer": 4}
    recipe = build_recipe({"method": method, "run": {"on_rank_failure": "drop"}})
    part = regroup.Regrouping(recipe, Quorum(members=(0, 1, 2, 3), process=3), None)
    part.opened(after_rounds(recipe, 0, shards))
    return part


def after_rounds(recipe: Recipe, rounds: int, shards: int = 1) -> Any:
    """What a rank's part looks at in a run of four ranks."""
    return SimpleNamespace(
        folder=Path("run"),
        recipe=recipe,
        placement=SimpleNamespace(shards=shards, ranks_per_worker=shards, num_ranks=4),
        saving=SimpleNamespace(wait=lambda: None),
        algorithm=SimpleNamespace(state=SimpleNamespace(rounds_done=rounds)),
        notices=[],
    )


@pytest.mark.parametrize(
    ("after", "dropped"),
    [
        ([(0, 2, 3), (0, 3)], ["[1]", "[1, 2]"]),
        ([(0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 3)], ["[]", "[]", "[2]"]),
    ],
)
def test_workers_go_with_ranks_that_trained_them(
    after: list[tuple[int, ...]], dropped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a rank fails while the others resume; not if it has only just joined."""
    part, found = dropping(monkeypatch, *after), []
    for _ in after:
        assert part.meet()
        found.append(dict(part.given())["method.dropped"])
    assert found == dropped


@pytest.mark.nightly
def test_ranks_that_all_live_and_fail_each_time_do_not_meet_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For instance where two of them do not reach each other, or a loss raises an error that looks
    like one of a connection. A round that is trained again is no new one.
    """
    everybody = (0, 1, 2, 3)
    part = dropping(monkeypatch, *[everybody] * 3, *[(0, 1, 3)] * 6)
    part.recovers, recipe = True, build_recipe({"method": {"workers_per_trainer": 4}})

    def fails_after(rounds: int) -> bool:
        part.opened(after_rounds(recipe, rounds))
        assert part.failed(RankFailureError("rank 1 lost the connection"))
        return part.meet()

    assert all(fails_after(rounds) for rounds in (2, 2, 2))
    assert fails_after(2), "a rank has failed, so the others may train now"
    assert all(fails_after(rounds) for rounds in (2, 3, 2, 3))
    with pytest.raises(RankFailureError, match=r"lost the connection; all ranks live, and this ha"):
        fails_after(3)


def test_no_rank_continues_if_each_island_has_lost_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of two broken islands could make up a whole one, without a worker."""
    part = dropping(monkeypatch, (1, 3), shards=2)
    with pytest.raises(RankFailureError, match="each island of 2 ranks has lost one"):
        part.meet()


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
def test_a_machine_without_the_folder_joins_and_one_with_another_line_does_not(
    small: list[str], tmp_path: Path
) -> None:
    """Each has a disk of its own; the others train on when the wrong one is turned away."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["diloco", *small, "--run.folder", "run", "--evaluation.every", "1000"]
    words += ["--method.workers_per_trainer", "4"]
    endless = [*ADLOCO, "train", *words, "--restart", "--ranks", "1", "--machines", "2"]
    endless += ["--meet", f"127.0.0.1:{port}", "--run.on_rank_failure", "replace"]
    endless += ["--run.checkpoint_every", "1", "--run.copy_every", "1"]

    def start(name: str, tokens: str = "100000000") -> subprocess.Popen[str]:
        (tmp_path / name).mkdir()
        line = [*endless, "--run.tokens", tokens]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=tmp_path / name, stdout=pipe, stderr=pipe, text=True)

    folder, machines = tmp_path / "first" / "run", [start("first")]
    try:
        until(lambda: listens(port), machines[0])
        machines.append(start("second"))
        until((folder / "metrics.jsonl").exists, machines[0])
        wrong = start("wrong", "90000000")
        machines.append(wrong)
        assert "run.tokens differs between ranks" in wrong.communicate(timeout=120)[1]
        assert wrong.returncode == 2
        until(lambda: "regroup" in kinds(folder), machines[0])
        machines.append(start("third"))
        until(lambda: "join" in kinds(folder), machines[0])
        machines.remove(wrong)
        said = interrupted_later(folder, machines)
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [130] * 3, said
    assert "rank 2 has come and cannot take part: run.tokens differs" in said[0][0]
    assert kinds(folder) == ["begin", "stop", "regroup", "stop", "join", "stop"]
    assert_undisturbed(words, folder, tmp_path / "whole")
