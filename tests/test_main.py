"""What `adloco` sets before torch is imported."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import adloco.__main__ as entry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/loadavg is of Linux")


@pytest.mark.parametrize(
    ("running", "cores", "busy"),
    [
        ([1, 1, 1, 1, 1], 2, False),  # This process alone.
        ([2, 3, 1, 2, 2], 2, True),
        ([9, 1, 1, 9, 1], 2, False),  # Something short.
        ([32, 32, 32, 32, 32], 64, False),
        ([33, 33, 33, 33, 33], 64, True),
    ],
)
def test_threads_sleep_while_they_wait_if_others_compute(
    running: list[int], cores: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(f"0.5 0.4 0.3 {count}/345 6789\n" for count in running)
    file = SimpleNamespace(read_text=lambda: next(texts))
    monkeypatch.setattr(entry, "Path", lambda name: file)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(entry.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("adloco.cli.main.main", lambda: 7)
    assert entry.main() == 7
    assert os.environ.pop("OMP_WAIT_POLICY", "") == ("PASSIVE" if busy else "")


def test_what_the_user_has_set_stays() -> None:
    """However busy this machine is."""
    code = (
        "import os; import adloco.__main__ as entry; entry._others_compute = lambda: True; "
        "import sys; sys.argv = ['adloco', 'recipes']; entry.main(); "
        "print(os.environ['OMP_WAIT_POLICY'], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_WAIT_POLICY": "ACTIVE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "ACTIVE\n"


def test_ctrl_c_while_python_ends_changes_nothing_any_more() -> None:
    """A second one may come after the run was saved, as the libraries are closed."""
    code = (
        "import atexit, os, signal, sys; "
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); "
        "import adloco.__main__ as entry; sys.argv = ['adloco', 'recipes']; sys.exit(entry.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
