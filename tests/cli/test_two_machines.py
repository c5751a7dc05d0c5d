"""The walk-through of docs/clusters.md on two hosts: network namespaces joined by a cable, each
with a torchrun of its own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = {"adloco-a": "10.77.0.1", "adloco-b": "10.77.0.2"}


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two network namespaces with one cable between them."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            "adloco-a",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            "adloco-b",
        )
        for host, address in HOSTS.items():
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", host, "link", "set", link, "up")
    except subprocess.CalledProcessError as error:
        remove_hosts()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield
    remove_hosts()


def remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def sent(host: str) -> int:
    """Bytes that the host has put on the cable, as the kernel counts them."""
    (link,) = json.loads(ip("-n", host, "-s", "-j", "link", "show", "cable"))
    return int(link["stats64"]["tx"]["bytes"])


@pytest.mark.nightly
def test_two_machines_of_two_ranks(hosts: None, small: list[str], tmp_path: Path) -> None:
    """Each machine is an island of two shards; only what islands exchange crosses the cable."""
    words = ["-m", "adloco", "train", "diloco", *small]
    words += shlex.split("--placement.shard_size 2 --model.hidden_size 96")
    # In few bits, headers would outweigh what is sent.
    words += ["--run.checkpoint_every", "1000", "--wire.format", "fp32"]
    machines = []
    for host, address in HOSTS.items():
        first = "true" if host == "adloco-a" else "false"
        launcher = shlex.split(
            "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 "
            f"--rdzv-conf is_host={first} --local-addr {address}"
        )
        command = [
            "ip",
            "netns",
            "exec",
            host,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launcher,
            *words,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        machines.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [machine.communicate(timeout=150) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], [error for _, error in outputs]
    assert sum(out.count("validation loss") for out, _ in outputs) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Headers, acknowledgements, scalars and records come on top of that. Checkpoints do not, and
    # neither does island traffic, which is many times as much.
    for host in HOSTS:
        assert summary["bytes"] < sent(host) < 1.15 * summary["bytes"] < summary["bytes_inside"]
