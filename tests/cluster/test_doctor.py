"""`adloco doctor`: what it prints, over a shaped link too."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from adloco.cli.main import main
from adloco.cluster.network import interfaces
from adloco.plan.link import Link, bandwidth_text, latency_text
from adloco.run.checkpoint import list_checkpoints
from adloco.run.start import open_recipe
from tests.run.test_training_run import make_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("bits", "text"),
    [(9.4e8, "940mbit"), (1e9, "1gbit"), (5e5, "500kbit"), (12.34e3, "12.3kbit"), (50, "0.05kbit")],
)
def test_a_bandwidth_is_read_back(bits: float, text: str) -> None:
    assert bandwidth_text(bits / 8) == text
    assert Link.parse(text).bytes_per_second == pytest.approx(bits / 8, rel=5e-3)
    assert 999.9e6 < 8 * Link.parse(bandwidth_text(999.96e6 / 8)).bytes_per_second < 1000.1e6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0204, "20.4ms"), (2.5, "2.5s"), (31e-6, "31us"), (0.0, "0us")]
)
def test_a_latency_is_read_back(seconds: float, text: str) -> None:
    assert latency_text(seconds) == text
    assert Link.parse(f"1mbit,{text}").latency_seconds == pytest.approx(seconds)


def test_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "adloco: --ranks must be >= 1, got 0\n"
    assert main(["doctor"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    # Without a terminal, a line says what is being done where it can take a while.
    lines.remove(["checking", "that", "all see the same folder ..."])
    checks = ["versions", "devices", "interface", "ports", "folder", "disk", "links"]
    assert [check for _, check, _ in lines] == checks
    assert {level for level, _, _ in lines} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_full_for_a_recipe(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert main(["doctor", "diloco", *small]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^problem  disk +0\.0 GB are free .* 3 checkpoints take", out, re.MULTILINE)


def test_a_machine_that_others_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if "lo" not in interfaces():
        pytest.skip("the loopback is not named lo here")
    assert main(["doctor"]) == 1
    assert "where no other machine reaches it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", ["", "--model.dtype bf16 --wire.format int4 --wire.feedback params"]
)
def test_the_size_of_a_checkpoint(more: str, small: list[str], tmp_path: Path) -> None:
    """Of a run that is stopped in a round. Besides the tensors, it has some kilobytes of text."""
    words = [*small, "--model.hidden_size", "128", "--inner.optimizer", "adamw", *more.split()]
    run = make_run("diloco", words)
    rounds = run.rounds()
    next(rounds)
    run.stop()
    assert list(rounds) == []
    folders = list_checkpoints(tmp_path / "run" / "checkpoints")
    written = sum(file.stat().st_size for file in folders[-1].iterdir())
    assert open_recipe(run.recipe).checkpoint_bytes() == pytest.approx(written, rel=0.05)


OVER_LINKS = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from links_network import DEVICE, LinksRefusedError, LinkShape, Network, address
from links_network import enter_private_namespaces
try:
    enter_private_namespaces()
    with Network(2, LinkShape(bits_per_second=2e7, latency_seconds=0.02, loss=0, mtu=1500)) as net:
        meeting = dict(MASTER_ADDR=address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME=DEVICE)
        meeting |= dict(WORLD_SIZE="2", GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        words = [sys.executable, "-m", "adloco", "doctor"]
        ranks = [
            net.start(
                rank, words, os.environ | meeting | dict(RANK=str(rank), GROUP_RANK=str(rank)),
                sys.stderr.buffer,
            )
            for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
except LinksRefusedError as error:
    print(error, file=sys.stderr)
    sys.exit(22)
"""


@pytest.mark.nightly
def test_over_a_link_of_20_mbit_and_20_ms() -> None:
    """A link gives no more than it has, however busy this machine is."""
    words = [sys.executable, "-c", OVER_LINKS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=os.environ)
    if done.returncode == 22:
        pytest.skip(f"virtual links are not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = re.search(r'islands = 2; bandwidth = "(.+?)"; latency = "(.+?)"', done.stdout)
    assert found, done.stdout
    link = Link.parse(f"{found[1]},{found[2]}")
    assert 1e5 < link.bytes_per_second <= 2e7 / 8 * 1.01
    assert 0.02 <= link.latency_seconds < 1


@pytest.mark.nightly
def test_ranks_of_one_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "2"]) == 0
    out = capfd.readouterr().out
    assert out.count("versions") == 1 and "the same on 2 ranks" in out
    assert "measuring the links between islands ..." in out
    assert re.search(r'links .*for adloco plan --cluster: islands = 2; bandwidth = "', out)
