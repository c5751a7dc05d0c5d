"""The hub is asked whether it answers, so that nobody waits for its clients' retries."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from adloco.data.tokenizers import make_tokenizer
from adloco.hub_access import OFFLINE, SILENT, hub_asked
from adloco.models.sources.named_model import NamedModel


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """That of a hub which answers, until its server is closed."""

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield constants.ENDPOINT
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_used(address: str) -> None:
    with hub_asked("somebody/something") as silent:
        assert not silent and not constants.HF_HUB_OFFLINE


def test_a_hub_that_must_not_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"could not be loaded .{OFFLINE}.; down"):
        make_tokenizer("somebody/something", [])


def test_a_hub_that_is_silent_costs_seconds(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there; the real clients would try again for 25 s for each file."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with hub_asked(str(tmp_path)) as silent:
        assert not silent, "a folder is not at the hub"
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"data.tokenizer .* could not be loaded .{SILENT}.; down"):
        make_tokenizer("somebody/something", [])
    with pytest.raises(ValueError, match=f"name .* could not be loaded .{SILENT}.; allowed are"):
        NamedModel(name="somebody/something", pretrained=True).config(16)
    assert time.monotonic() - began < 10
    assert not constants.HF_HUB_OFFLINE
