"""Fixtures: a small corpus and the settings of a run that takes seconds."""

import atexit
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import warm_python as server

# Before anything of Hugging Face is imported: tests reach for no network and leave nothing in the
# caches of whoever runs them.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
# Processes that they start take theirs, which only this one removes.
OWN = f"adloco-tests-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-"
if OWN not in os.environ.get("HF_HOME", ""):
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix=OWN)
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# Before torch is imported: several processes of pytest and many ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Folders of tests are in memory where there is room: runs write many small files, each to disk.
SHARED_MEMORY = Path("/dev/shm")
if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))

SMALL = {
    "run.tokens": "8000",
    "run.checkpoint_every": "5",
    "run.trackers": "none",
    "model.hidden_size": "32",
    "model.num_layers": "1",
    "model.num_heads": "2",
    "model.num_kv_heads": "2",
    "model.intermediate_size": "48",
    "data.context_tokens": "32",
    "method.sync_every": "4",
    "evaluation.windows": "8",
}


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks new processes of Python from a server that has imported what they need.

    Not for tests of how the command itself, or a copy of its interpreter, starts.
    """
    server.start_server()
    server.wait_for_server()
    monkeypatch.setattr(subprocess, "Popen", server.Popen)


Train = Callable[[list[str]], subprocess.CompletedProcess[str]]


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Train:
    """Runs `adloco train WORDS` in this process, whose imports would take a new process seconds.

    It is for `--ranks`, which starts new processes itself.
    """
    from adloco.cli.main import main

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(["train", *words])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


MARK_STEPS = """
import itertools
import os
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


steps = itertools.count(1)


def mark(optimizer, args, kwargs):
    if next(steps) == 20:  # Not the first: the settings of an outer optimizer are tried out.
        Path(__file__).with_name("stepped-" + os.environ.get("RANK", "0")).touch()


register_optimizer_step_post_hook(mark)
"""

WaitForSteps = Callable[[int], None]


@pytest.fixture
def wait_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WaitForSteps:
    """Waits until each of so many ranks, in new processes, has trained for some steps."""
    folder = tmp_path / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(MARK_STEPS)  # Python imports it in every new process.
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def wait(num_ranks: int) -> None:
        for rank in range(num_ranks):
            wait_for(folder / f"stepped-{rank}")

    return wait


def wait_for(file: Path) -> None:
    """Wait until another process has made the file."""
    deadline = time.monotonic() + 120  # Against a test that hangs.
    while not file.exists():
        assert time.monotonic() < deadline, f"nobody made {file}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 short files with some structure to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    for index in range(40):
        lines = [" ".join(rng.choice(words) for _ in range(8)) for _ in range(60)]
        (folder / f"{index:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def small(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run that takes seconds, in the folder tmp_path/run.

    Its text sample, which takes as long as the rounds of such a run, is short in this process.
    """
    monkeypatch.setattr("adloco.run.trained.ADDED_TOKENS", 8)
    return small_flags(corpus, tmp_path)


def small_flags(corpus: Path, folder: Path) -> list[str]:
    settings = SMALL | {
        "data.path": str(corpus),
        "data.cache": str(folder / "cache"),
        "run.folder": str(folder / "run"),
    }
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than cores for `-n auto`, because many tests wait for ranks and other
    processes that they have started.
    """
    return min(8, (os.cpu_count() or 1) + 2)


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of `warm_python` once for all processes of pytest."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        server.start_server()


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> None:
    """Let the ranks of `run_on_ranks` find imported what most of them need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*server.PRELOADED])
    forkserver.ensure_running()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests marked nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked nightly, unless `--all` is given."""
    if not config.getoption("--all"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in set(nightly)]
