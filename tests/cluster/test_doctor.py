"""`adloco doctor`: what it measures on ranks, and what it prints."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from adloco.cli.main import main
from adloco.cluster.network import gloo_address, interfaces, port_is_free
from adloco.cluster.rank_facts import all_facts, look, who_sees
from adloco.distributed.launch import link_test
from adloco.distributed.launch.link_test import MeasuredLink, measure_links
from adloco.distributed.testing import run_on_ranks
from adloco.plan.link import Link, bandwidth_text, latency_text
from adloco.run.checkpoint import list_checkpoints
from adloco.run.recipe_probe import checkpoint_bytes
from tests.run.test_training_run import make_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured_by_a_clock() -> tuple[list[MeasuredLink], list[str]]:
    """The clock goes on by half a second whenever it is read; that of rank 1 is 5 s ahead."""
    reads = iter(range(10**6))
    now = 1e9 + 5 * (dist.get_rank() == 1)
    clock = SimpleNamespace(perf_counter=lambda: next(reads) / 2, time=lambda: now)
    link_test.time = clock  # type: ignore[assignment]
    link_test.LARGEST_BYTES = 1 << 20
    steps: list[str] = []
    return measure_links([0, 1, 2], steps.append), steps


def test_links_of_a_ring() -> None:
    """A transfer takes 0.5 s, never a whole one, so that the size grows to 1 MiB; half a round trip
    of 0.5 s is latency. The answer comes 0.25 s after the ping was sent.
    """
    results = run_on_ranks(measured_by_a_clock, 4)
    assert all(links == results[0][0] for links, _ in results)
    links, steps = results[0]
    assert [(link.source, link.target) for link in links] == [(0, 1), (1, 2), (2, 0)]
    assert [link.bytes_per_second for link in links] == [2**20 / 0.25] * 3
    assert [link.latency_seconds for link in links] == [0.25] * 3
    assert [link.clock_seconds for link in links] == [4.75, -5.25, -0.25]
    assert len(steps) == 1 + 3 and steps[-1] == "bandwidth of the links, 1.0 MB at a time"


def seen(folder: str) -> list[bool]:
    if dist.get_rank() == 1:
        Path.exists = lambda *_, **__: False  # type: ignore[method-assign]
    from adloco.cluster import rank_facts

    rank_facts.SEEN_SECONDS = 0.2
    return who_sees(Path(folder) if dist.get_rank() == 0 else Path("elsewhere"))


def test_a_folder_that_a_rank_does_not_see(tmp_path: Path) -> None:
    assert run_on_ranks(seen, 3, str(tmp_path)) == [[True, False, True]] * 3
    assert list(tmp_path.iterdir()) == []


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = look(tmp_path / "not" / "there", "cpu")
    assert all_facts(facts) == [facts]
    assert (facts.folder, facts.writable, facts.device) == (str(tmp_path), "", "cpu")
    assert facts.free_bytes > 0 and facts.addresses.get("lo", "127.0.0.1") == "127.0.0.1"
    with socket.create_server(("", 0)) as server:
        assert not port_is_free(server.getsockname()[1])
    name = next(iter(interfaces()), None)
    if name:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert gloo_address() == interfaces()[name]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    assert gloo_address() == ""


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
    assert "on a CPU, --memory.gib 8 says" in out


def test_a_machine_that_others_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if "lo" not in interfaces():
        pytest.skip("the loopback is not named lo here")
    assert main(["doctor"]) == 1
    assert "where no other machine reaches it" in capsys.readouterr().err


def test_the_size_of_a_checkpoint(small: list[str], tmp_path: Path) -> None:
    """Of a run that is stopped in a round. Besides the tensors, it has some kilobytes of text."""
    run = make_run("diloco", [*small, "--model.hidden_size", "128"])
    rounds = run.rounds()
    next(rounds)
    run.stop()
    assert list(rounds) == []
    folders = list_checkpoints(tmp_path / "run" / "checkpoints")
    written = sum(file.stat().st_size for file in folders[-1].iterdir())
    assert checkpoint_bytes(run.recipe) == pytest.approx(written, rel=0.05)


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
    assert re.search(r'links .*for adloco plan --cluster: islands = 2; bandwidth = "', out)
