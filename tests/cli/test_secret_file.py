"""Where run.secret_file is read, refused and ignored; `tests/elastic` has the proof itself."""

from pathlib import Path
from typing import Any

import pytest

from adloco.cli.main import main
from adloco.cli.rank_processes import Machines
from adloco.config.settings import RunSettings
from tests.pages import NEEDS_ELASTIC

MEET = ["--restart", "--machines", "2", "--meet", "127.0.0.1:29400"]


@NEEDS_ELASTIC
def test_machines_that_meet_need_a_good_file(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text("sixteen bytes ok")
    file.chmod(0o644)
    words = [*small, *MEET, "--run.secret_file", str(file)]
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"adloco: run.secret_file '{file}' may be read or changed by others")
    assert said.endswith(f"use chmod 600 {file}\n") and said.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_ranks_of_torchrun_refuse_a_secret(
    command: str,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command, "diloco", *small, "--run.secret_file", "secret"]) == 2
    said = capsys.readouterr().err
    assert "run.secret_file 'secret' keeps strangers from the meeting point of --meet, and" in said
    assert "start the ranks with adloco train --machines and --meet, or leave it out" in said


def test_a_job_that_torchrun_would_start_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["launch", "diloco", "--on", "slurm", "--islands", "2", "--gpus-per-island", "1"]
    assert main([*line, "--dry-run", "--run.secret_file", "secret"]) == 2
    captured = capsys.readouterr()
    assert "run.secret_file 'secret' keeps strangers" in captured.err and captured.out == ""


def test_one_machine_reads_no_secret(small: list[str]) -> None:
    """Strangers cannot reach its store, and a recipe of several machines is often tried on one."""
    assert main(["train", "diloco", *small, "--run.tokens", "3000", "--run.secret_file", "x"]) == 0


@NEEDS_ELASTIC
@pytest.mark.parametrize(
    ("host", "secret", "says"),
    [
        ("127.0.0.1", b"", False),
        ("192.0.2.1", b"", True),  # TEST-NET-1 of RFC 5737.
        ("192.0.2.1", b"sixteen bytes ok", False),
    ],
)
def test_a_sentence_says_what_is_open_without_a_secret(
    host: str,
    secret: bytes,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from adloco.elastic import machines

    given: list[Any] = []
    monkeypatch.setattr(machines, "on_machines", lambda *words: given.append(words))
    Machines(host=host, port=29400, number=2).rendezvous(
        1, RunSettings(timeout_seconds=60.0), secret
    )
    assert given == [((host, 29400), 2, 1, 60.0, secret)]
    said = capsys.readouterr().out
    sentence = f"whoever can reach {host}:29400 can use the store of this run, and end it"
    assert (f"without run.secret_file, {sentence}" in said) == says
