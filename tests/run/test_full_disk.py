"""A full disk: a run warns, continues, saves when there is room, and ends only for its records."""

import errno
import resource
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from adloco import whole_file
from adloco.cli import training_loop
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.testing import run_on_ranks
from adloco.errors import RunWarning
from adloco.run import checkpoint, part_file, records, saving
from adloco.run.training_run import TrainingRun
from tests.problems import numbers_of

NO_ROOM = "No space left on device"


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, NO_ROOM)


def at(calls: set[int], real: Callable[..., Any], instead: Callable[..., Any] = full) -> Any:
    """The function, which meets a full disk in these of its calls, counted from 1."""
    count = iter(range(1, 1000))

    def call(*arguments: Any, **named: Any) -> Any:
        return (instead if next(count) in calls else real)(*arguments, **named)

    return call


def in_round(
    number: int, real: Callable[..., Any], instead: Callable[..., Any] = full
) -> Callable[..., Any]:
    """The function, which meets a full disk in the checkpoint of this round."""

    def call(tensors: Any, path: Path) -> Any:
        missing = path.parent.name.startswith(f"round-{number:06d}")
        return (instead if missing else real)(tensors, path)

    return call


class AtOnce:
    """Does what a thread would do before the run continues, so that tests know when it is done."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        pass

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


@pytest.fixture
def words(small: list[str]) -> list[str]:
    """A run of 4 rounds that saves at its start, after round 2 and after round 4."""
    return ["train", "diloco", *small, "--run.tokens", "4096", "--run.checkpoint_every", "2"]


def test_a_run_continues_and_saves_when_there_is_room(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no room after round 2; there is after round 3, which has no checkpoint else."""

    def unwritten(*arguments: Any) -> None:
        raise SafetensorError(f"I/O error: {NO_ROOM} (os error 28)")

    monkeypatch.setattr(part_file, "save_tensors", in_round(2, part_file.save_tensors, unwritten))
    monkeypatch.setattr(saving, "ThreadPoolExecutor", AtOnce)
    assert main(words) == 0
    run, said = tmp_path / "run", capsys.readouterr()
    warning = (
        f"a checkpoint cannot be written in {run} (I/O error: {NO_ROOM} (os error 28)); the run "
        "continues and tries again after each round, and the newest checkpoint is "
        "round-000000-step-00000000"
    )
    assert said.err == f"adloco: {warning}\n"
    assert f"WARNING {warning}\n" in (run / "train.log").read_text()
    assert [path.name[:12] for path in sorted((run / "checkpoints").iterdir())] == [
        "round-000003",
        "round-000004",
    ]


def train_on_full_disk(words: list[str]) -> int:
    """A rank that has no room for its second checkpoint, if it is rank 1."""
    if this_rank() == 1:
        part_file.save_tensors = in_round(2, part_file.save_tensors)
    saving.ThreadPoolExecutor = AtOnce  # type: ignore[misc, assignment]
    given, _ = take_settings(words)
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), given)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)
        return len(list(run.rounds()))


@pytest.mark.nightly
def test_ranks_save_together_when_there_is_room(words: list[str], tmp_path: Path) -> None:
    assert run_on_ranks(train_on_full_disk, 2, words[2:]) == [4, 4]
    assert [path.name[:12] for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "round-000003",
        "round-000004",
    ]


def test_without_its_last_checkpoint_a_run_has_not_ended(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as later:
        later.setattr(part_file, "save_tensors", in_round(4, part_file.save_tensors))
        assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"adloco: the last checkpoint of the run cannot be written in {run} ({NO_ROOM}); make room "
        "there, then resume from round-000002-step-00000008 with: adloco train --resume "
        f"{run}"
    )
    assert not (run / "summary.json").exists()
    expected = numbers_of(run)
    assert main(["train", "--resume", str(run)]) == 0
    assert numbers_of(run) == expected
    assert checkpoint.newest(run / "checkpoints").name.startswith("round-000004")


@pytest.mark.parametrize("point", ["to_disk", "open"])
def test_without_its_records_a_run_ends(
    point: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    if point == "to_disk":
        monkeypatch.setattr(records, "to_disk", at({2}, records.to_disk))
    else:
        real = Path.open
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, mode="r", **named: (
                full()
                if (path.name, mode) == ("metrics.jsonl", "ab")
                else real(path, mode, **named)
            ),
        )
    assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"adloco: the records of the run cannot be written in {run} ({NO_ROOM}); make room there, "
        f"then resume with: adloco train --resume {run}"
    )


def test_a_run_that_cannot_begin_leaves_no_folder(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(part_file, "save_tensors", full)
    assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"the run cannot begin in {tmp_path / 'run'} ({NO_ROOM}); make room there" in error
    assert not (tmp_path / "run").exists()


def test_a_report_can_be_drawn_when_there_is_room(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as later:
        later.setattr(training_loop, "write_report", full)
        assert main(words) == 0
    assert f"the report cannot be written in {run} ({NO_ROOM}); make room" in (
        capsys.readouterr().out
    )
    assert main(["train", "--resume", str(run)]) == 0
    assert (run / "report.html").exists()
    monkeypatch.setattr(whole_file, "to_disk", full)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert f"report.html cannot be written ({NO_ROOM}); make room there" in error


def test_a_limit_on_the_size_of_files_is_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is room, so making some would change nothing. safetensors names the error in a text."""
    assert main(words) == 0
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert main(["report", str(tmp_path / "run")]) == 2
        assert main([*words, "--run.folder", str(tmp_path / "other")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    report, run = capsys.readouterr().err.splitlines()
    advice = "raise the limit on the size of files (ulimit -f)"
    assert report.endswith(f"report.html cannot be written (File too large); {advice}")
    assert "the run cannot begin in" in run and f"(os error 27)); {advice}" in run


def test_a_run_folder_that_is_gone_is_not_made_again(words: list[str], tmp_path: Path) -> None:
    """It was renamed while a round was trained, and the run was then told to stop."""
    given, _ = take_settings(words)
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), given)))
    rounds = run.rounds()
    next(rounds)
    run.folder.rename(tmp_path / "renamed")
    run.stop()
    with pytest.raises(ValueError, match=r"in .*/run \(No such file .*; bring that folder back"):
        list(rounds)
    assert not run.folder.exists()
    renamed = TrainingRun.resume(tmp_path / "renamed")
    assert len(list(renamed.rounds())) == 4
