"""`adloco train --notify`: what is told to whom, and when."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from adloco.cli import alerts
from adloco.cli.alerts import Alerts
from adloco.cli.main import main


@pytest.fixture
def told(tmp_path: Path) -> tuple[str, Path]:
    """A command that keeps what it reads, and the file in which it does."""
    script, kept = tmp_path / "keep.py", tmp_path / "told.txt"
    script.write_text(f"import sys\nopen({str(kept)!r}, 'a').write(sys.stdin.read())")
    return f"{sys.executable} {script}", kept


def test_a_command_hears_of_the_end_and_of_a_failure(
    small: list[str], told: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, kept = told
    run = tmp_path / "run"
    assert main(["train", "diloco", *small, "--run.tokens", "2000", "--notify", command]) == 0
    assert kept.read_text().startswith(f"adloco: {run} on ")
    assert " has ended: validation loss " in kept.read_text()
    assert command not in (run / "recipe.toml").read_text()
    kept.unlink()
    monkeypatch.setenv("ADLOCO_NOTIFY", command)
    assert main(["train", "diloco", *small]) == 2
    assert " has failed: run folder " in kept.read_text()


def test_a_bad_recipe_is_refused_at_once_and_told(
    told: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the modules are imported that need torch, and before anything is said of a text."""
    command, kept = told
    monkeypatch.setitem(sys.modules, "adloco.cli.train_here", None)  # Importing it raises.
    assert main(["train", "dilco", "--notify", command]) == 2
    assert " has failed: recipe 'dilco' is neither " in kept.read_text()
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("warm_python")
def test_a_launcher_tells_of_the_failure_of_its_ranks_once(
    small: list[str], told: tuple[str, Path]
) -> None:
    command, kept = told
    words = ["train", "diloco", *small, "--ranks", "2", "--notify", command]
    assert main([*words, "--data.path", "/none"]) == 2
    (line,) = kept.read_text().splitlines()
    assert " has failed: " in line


def test_a_url_gets_json_and_its_failures_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        with Alerts(f"http://127.0.0.1:{server.server_port}/hook") as telling:
            for text in ("all is well", "again", "and again"):
                telling.tell("ended", text)
                telling.wait()
        server.shutdown()
    assert {key: got[0][key] for key in ("event", "run")} == {"event": "ended", "run": "a run"}
    assert got[0]["text"].endswith("has ended: all is well")
    error = capsys.readouterr().err
    assert error.count("--notify cannot be called (HTTP Error 500") == 1


def test_a_stall_and_its_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round takes longer than three times the first."""
    heard: list[tuple[str, str]] = []
    going_on = threading.Event()

    class Hearing(Alerts):
        def tell(self, event: alerts.Event, text: str) -> None:
            heard.append((event, text))
            going_on.set()

    def rounds() -> Iterator[dict[str, int]]:
        yield {"round": 1}
        assert going_on.wait(30)
        yield {"round": 2}

    monkeypatch.setattr(alerts, "STALL_SECONDS", 0.2)
    assert len(list(Hearing("true").watched(rounds(), 0.0))) == 2
    assert [event for event, _ in heard] == ["stalled", "recovered"]


def test_others_say_nothing_and_a_wrong_command_is_refused(
    told: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, kept = told
    monkeypatch.setenv("RANK", "1")
    with Alerts(command) as telling:
        telling.tell("ended", "here too")
    assert not kept.exists()
    with pytest.raises(ValueError, match="No closing quotation"):
        Alerts("mail 'me")
