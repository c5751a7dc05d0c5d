"""A launcher of ranks that recover."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adloco.distributed.launch.rank_store import of_this_start
from adloco.elastic import machine_launcher
from adloco.elastic.machine_launcher import Recovery, start_ranks
from adloco.elastic.machines import on_machines
from adloco.elastic.store import Decision, decide, report_end
from adloco.errors import RANK_FAILURE
from tests.conftest import wait_for
from tests.elastic.test_machines import listens
from tests.elastic.threads import at_once


def test_a_launcher_ends_ranks_that_are_all_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give a sign of life and then no more, so none of them can notice it."""
    (tmp_path / "adloco.py").write_text(
        "import os, time\n"
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']),\n"
        "    is_master=False, timeout=timedelta(seconds=20))\n"
        "keys = dist.PrefixStore('quorum-0', dist.PrefixStore('adloco-0', store))\n"
        "keys.add('beats-' + os.environ['RANK'], 1)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine_launcher, "START_SECONDS", 0.5)
    replaced: list[int] = []
    recovery = Recovery(
        silent_seconds=0.5, timeout_seconds=0, replaces=lambda: bool(replaced.append(1))
    )
    assert start_ranks(2, [], 1.0, recovery=recovery) == RANK_FAILURE


@pytest.mark.parametrize("code", [0, RANK_FAILURE])
def test_a_machine_that_waits_to_join_ends_as_the_members_do(
    code: int, address: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adloco.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    members = at_once(*[lambda: on_machines(address, 2, 1, 60)] * 2)
    spare = on_machines(address, 2, 1, 60)
    for place in members:
        report_end(of_this_start(place.store), place.first, code)
    recovery = Recovery(silent_seconds=60, timeout_seconds=0)
    assert start_ranks(1, [], 1.0, recovery=recovery, rendezvous=lambda: spare) == code


def test_a_machine_that_was_left_out_ends_as_the_members_do(
    address: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank is killed, and the other machine completes the run before the new rank joins."""
    (tmp_path / "adloco.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    places = at_once(*[lambda: on_machines(address, 2, 1, 60)] * 2)
    other, left_out = sorted(places, key=lambda place: place.first)
    store = of_this_start(left_out.store)

    def replaces() -> bool:
        report_end(store, other.first, 0)
        return True

    decide(store, 1, Decision(members=[other.first], failed=[left_out.first], shape=[1, 1]))
    recovery = Recovery(silent_seconds=60, timeout_seconds=0, replaces=replaces)
    assert start_ranks(1, [], 1.0, recovery=recovery, rendezvous=lambda: left_out) == 0


KEEPS_STORE = """
import sys
import time
from adloco.elastic.machines import on_machines
place = on_machines(("127.0.0.1", int(sys.argv[1])), 2, 1, 60)
time.sleep(600)
"""
LAUNCHES = """
import os
import sys
from adloco.cli.rank_processes import Machines, on_ranks
from adloco.elastic.machine_launcher import Recovery
machines = Machines(host="127.0.0.1", port=int(sys.argv[1]), number=2)
os.environ["PYTHONPATH"] = sys.argv[2]
on_ranks(1, None, [], recovery=Recovery(silent_seconds=60, timeout_seconds=600), machines=machines)
"""
BEGINS = """
import time
from pathlib import Path
Path(__file__).with_name("began").touch()
time.sleep(600)
"""


@pytest.mark.usefixtures("warm_python")
def test_a_launcher_whose_store_is_frozen_can_be_told_to_stop(
    address: tuple[str, int], tmp_path: Path
) -> None:
    """As if its link was cut. The main thread waits for an answer, in torch."""
    (tmp_path / "adloco.py").write_text(BEGINS)
    pipe, port = subprocess.PIPE, str(address[1])
    line = [sys.executable, "-c", KEEPS_STORE, port]
    with subprocess.Popen(line) as first:
        while not listens(address):
            assert first.poll() is None
        line = [sys.executable, "-c", LAUNCHES, port, str(tmp_path)]
        launcher = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)
        try:
            wait_for(tmp_path / "began")
            first.send_signal(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(1.0)
            launcher.send_signal(signal.SIGTERM)
            _, error = launcher.communicate(timeout=30)
        finally:
            launcher.kill()
            first.kill()
    assert launcher.returncode == 130
    assert error == (
        f"adloco: told to stop by SIGTERM, while the launcher at 127.0.0.1:{port} did not answer; "
        "the ranks of this machine have ended; the same command starts them again\n"
    )
