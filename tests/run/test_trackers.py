"""Trackers: TensorBoard's files hold what metrics.jsonl holds, and a tracker that fails at any
point stops nothing.
"""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from adloco.cli.main import main
from adloco.errors import RunWarning
from adloco.run import trackers
from adloco.tracking.with_accelerate import MLflow, state_kept

BEGIN_AND_LEAVE = """
import sys
from pathlib import Path
from adloco.run.training_run import TrainingRun
from adloco.config.recipe import build_recipe, read_values
for record in TrainingRun.create(build_recipe(read_values(sys.argv[1]))).rounds():
    if record["round"] == 3:
        break
"""


def expected(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, named as the trackers name them."""
    top = {
        key: value
        for key, value in line.items()
        if key not in ("trainers", "workers", "islands", "merges", "changes", "memory", "sync")
    }
    top |= {f"sync/{key}": value for key, value in line["sync"].items()}
    for phase, row in line["memory"].items():
        top |= {f"memory-{phase}/{key}": value for key, value in row.items()}
    for row in line["trainers"]:
        top |= {f"trainer-{row['trainer']}/{key}": value for key, value in row.items()}
    for row in line["workers"]:
        top |= {f"worker-{row['worker']}/{key}": value for key, value in row.items()}
    return {key: value for key, value in top.items() if value is not None}


def tensorboard_scalars(run: Path) -> dict[int, dict[str, float]]:
    """Values in the event files: step -> name -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), "a round appears twice"
            found[event.step][name] = event.value
    return found


def same_as_metrics(run: Path) -> int:
    """Compare every scalar with metrics.jsonl; the number of rounds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = tensorboard_scalars(run)
    assert list(found) == [line["tokens"] for line in lines]
    for line in lines:
        assert found[line["tokens"]] == pytest.approx(
            expected(line), rel=1e-6
        )  # The files hold float32.
    return len(lines)


@pytest.mark.usefixtures("warm_python")
def test_tensorboard_holds_the_numbers_of_the_metrics_also_after_a_resume(
    small: list[str], tmp_path: Path
) -> None:
    """Rounds 2 and 3 are trained twice, with the folder left after the third and the only
    checkpoint before the first.
    """
    short = ["--run.tokens", "8000"]
    assert main(["train", "adloco", *small, *short, "--run.trackers", "auto"]) == 0
    whole, parts = tmp_path / "run", tmp_path / "parts"
    assert same_as_metrics(whole) > 3

    (tmp_path / "again.toml").write_text(
        (whole / "recipe.toml").read_text().replace(f'folder = "{whole}"', f'folder = "{parts}"')
    )
    subprocess.run(
        [sys.executable, "-c", BEGIN_AND_LEAVE, str(tmp_path / "again.toml")],
        check=True,
        timeout=100,
    )
    assert len(tensorboard_scalars(parts)) == 3
    assert main(["train", "--resume", str(parts)]) == 0
    assert same_as_metrics(parts) == same_as_metrics(whole)


def test_a_run_of_mlflow_that_is_continued_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow refuses other values, such as a longer budget, and would be left out."""
    given: list[dict[str, Any]] = []

    class Holds:
        def __init__(self, **options: str) -> None:
            pass

        def start(self) -> None:
            pass

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            given.append(values)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Holds)
    settings = {"run.tokens": 8}
    with state_kept():
        for tokens, run in ((0, ""), (4, ""), (0, "a"), (4, "a")):
            if run:
                monkeypatch.setenv("MLFLOW_RUN_ID", run)
            MLflow().open(tmp_path, settings, tokens)
    assert given == [settings, settings, settings, {}]


class Fails:
    """A tracker that fails at one of its methods."""

    at = ""
    error: type[BaseException] = ConnectionError
    calls: list[str] = []  # noqa: RUF012

    def __init__(self, run_name: str, logging_dir: Path, purge_step: int = 0) -> None:
        self._meet("init")

    def start(self) -> None:
        self._meet("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["method.sync_every"] == 4
        self._meet("store")

    def log(self, values: dict[str, Any], step: int) -> None:
        self._meet("log")

    def finish(self) -> None:
        self._meet("finish")

    def _meet(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at:
            raise self.error("no network\n here")


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("init", ConnectionError),
        ("start", ConnectionError),
        ("store", ConnectionError),
        ("log", SystemExit),
        ("finish", ConnectionError),
    ],
)
@pytest.mark.filterwarnings("default")
def test_a_tracker_that_fails_is_one_warning(
    at: str,
    error: type[BaseException],
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Fails, "at", at)
    monkeypatch.setattr(Fails, "error", error)
    monkeypatch.setattr(Fails, "calls", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Fails)
    assert (
        main(["train", "single", *small, "--run.tokens", "4000", "--run.trackers", "tensorboard"])
        == 0
    )
    assert (
        capsys.readouterr().err
        == "adloco: tracker tensorboard failed and is left out from here on: no network here\n"
    )
    assert Fails.calls.count(at) == 1
    assert Fails.calls[-1] == at
    assert (tmp_path / "run" / "report.html").exists()


def test_the_library_warns_too(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "at", "start")
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Fails)
    following = trackers.Trackers(["tensorboard"], tmp_path).following(
        {"method.sync_every": 4}, tokens=0
    )
    with pytest.warns(RunWarning, match="tracker tensorboard failed"), following:
        pass


def test_no_tracker_can_ask_at_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B asks for a key there, behind the live view, and would wait for it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Asks(Fails):
        at = "no call"

        def start(self) -> None:
            assert not sys.stdin.isatty()
            assert sys.stdin.read() == ""

    terminal = Terminal("a key")
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Asks)
    with trackers.Trackers(["tensorboard"], tmp_path).following({"method.sync_every": 4}, 0):
        assert sys.stdin is terminal


def test_one_that_is_not_installed_or_not_known_is_named(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = next(
        name
        for name in ("clearml", "trackio", "mlflow", "wandb")
        if importlib.util.find_spec(name) is None
    )
    assert main(["train", "single", *small, "--run.trackers", f"tensorboard,{absent}"]) == 2
    message = capsys.readouterr().err
    assert message == (
        f"adloco: run.trackers names {absent}, which is not installed; pip install "
        f"'adloco[{absent}]', or leave it out\n"
    )
    for wrong in ("tensorbord", "auto,tensorboard"):
        assert main(["train", "single", *small, "--run.trackers", wrong]) == 2
        message = capsys.readouterr().err
        assert "run.trackers must be one of clearml, mlflow, tensorboard, trackio" in message
        assert "(auto and none stand alone)" in message
    assert not (tmp_path / "run").exists()


def test_auto_is_nothing_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with trackers.Trackers(["auto"], tmp_path).following({}, tokens=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_none_tracks_nothing(small: list[str], tmp_path: Path) -> None:
    assert main(["train", "single", *small, "--run.tokens", "4000"]) == 0
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_numbers_that_are_none_or_infinite_are_left_out() -> None:
    record = {
        "tokens": 8,
        "val_loss": None,
        "train_loss": math.nan,
        "trainers": [{"trainer": 3, "noise_scale": math.inf}],
        "workers": [],
        "memory": {},
        "sync": {"bytes": 16.0, "compression_ratio": None},
    }
    assert trackers.scalars(record) == {"tokens": 8.0, "sync/bytes": 16.0, "trainer-3/trainer": 3.0}


def test_an_accelerator_made_after_a_run_has_a_device_of_its_own(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trackers need a state of accelerate that says CPU, which the process would keep."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    assert main(["train", "single", *small, "--run.tokens", "4000", "--run.trackers", "auto"]) == 0
    assert (tmp_path / "run" / "tensorboard").exists()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert PartialState().device.type == "meta"


ALONE = """
import os, sys, torch
from pathlib import Path
from adloco.run.trackers import Trackers
os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ.pop("OMP_NUM_THREADS", None)
before = dict(os.environ), torch.get_num_threads()
with Trackers(["tensorboard"], Path(sys.argv[1])).following({}, tokens=0):
    pass
assert (dict(os.environ), torch.get_num_threads()) == before
assert not torch.distributed.is_initialized()
"""


@pytest.mark.nightly
def test_accelerate_starts_no_process_group_and_sets_no_threads(tmp_path: Path) -> None:
    """This process is rank 0 of two; starting a process group would wait for the other rank."""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(tmp_path)], check=True, timeout=60
    )
    assert (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("name", "offline", "left"),
    [
        ("wandb", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, "wandb/offline-run-*/*.wandb"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}, "mlflow.db"),
    ],
)
def test_other_tools_offline(
    name: str, offline: dict[str, str], left: str, small: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(name)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "adloco",
            "train",
            "single",
            *small,
            "--run.tokens",
            "4000",
            "--run.trackers",
            name,
        ],
        cwd=tmp_path,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert list(tmp_path.glob(left))
