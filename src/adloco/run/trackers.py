"""Experiment trackers that follow a run beside metrics.jsonl, through accelerate's classes. One
that fails is left out, and training goes on.

They run in the first process alone. Their step is the number of tokens, because steps change
meaning when batches grow.
"""

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from adloco.errors import require
from adloco.metrics import Record

PROJECT = "adloco"
TENSORBOARD = "tensorboard"
"""Name of the tracker, and of its folder in that of the run."""


class TrackerWarning(UserWarning):
    """A tracker failed and follows the run no longer."""


class Tracker(Protocol):
    """What is used of accelerate's `GeneralTracker`."""

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


class Trackers:
    """The trackers of a run, fewer as they fail. names: see `run.trackers`; a ValueError names one
    that is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        installed = _installed() if names else set()
        self._names = (
            [TENSORBOARD] * (TENSORBOARD in installed) if list(names) == ["auto"] else list(names)
        )
        for name in self._names:
            require(
                name in installed,
                f"run.trackers names {name}, which is not installed; pip install 'adloco[{name}]', or leave it out",
            )
        self._folder = folder
        self._following: dict[str, Tracker] = {}

    @contextmanager
    def following(self, settings: Mapping[str, Any], tokens: int) -> Iterator[None]:
        """Open them, tell them the settings of the run, and close them at the end. tokens: trained
        on so far, more than 0 when a run goes on.
        """
        self._start(settings, tokens)
        try:
            yield
        finally:
            for name, tracker in list(self._following.items()):
                with self._spared(name):
                    tracker.finish()

    def log(self, record: Record) -> None:
        """The numbers of a round."""
        values = scalars(record)
        for name, tracker in list(self._following.items()):
            with self._spared(name):
                tracker.log(dict(values), step=record["tokens"])

    def _start(self, settings: Mapping[str, Any], tokens: int) -> None:
        plain = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in settings.items()
        }
        for name in self._names:
            with self._spared(name):
                tracker = _make(name, self._folder, tokens)
                tracker.start()
                tracker.store_init_configuration(dict(plain))
                self._following[name] = tracker

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._following.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"tracker {name} failed and is left out from here on: {reason}",
                TrackerWarning,
                stacklevel=2,
            )


def scalars(record: Record) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl by name, for instance train_loss, sync/bytes,
    trainer-0/wire_error, worker-0/busy_seconds.
    """
    rows = {"": record, "sync/": record["sync"]}
    for kind in ("trainer", "worker"):
        rows |= {f"{kind}-{row[kind]}/": row for row in record[f"{kind}s"]}
    rows |= {f"memory-{phase}/": row for phase, row in record["memory"].items()}
    named = {prefix + key: value for prefix, row in rows.items() for key, value in row.items()}
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _make(name: str, folder: Path, tokens: int) -> Tracker:
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import patch_environment

    options: dict[str, dict[str, Any]] = {
        # A resumed run writes the rounds after its checkpoint again: what was tracked of them
        # before is hidden.
        TENSORBOARD: {"run_name": TENSORBOARD, "logging_dir": folder, "purge_step": tokens + 1},
        "wandb": {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), "name": folder.name},
        # Without its hooks on torch.save, argparse and TensorBoard.
        "clearml": {
            "run_name": PROJECT,
            "task_name": folder.name,
            "auto_connect_frameworks": False,
            "auto_connect_arg_parser": False,
        },
        "mlflow": {"experiment_name": PROJECT, "run_name": folder.name},
        "trackio": {"run_name": PROJECT, "name": folder.name, "resume": "allow"},
    }
    # accelerate's classes ask its state who is the main process. Taken for a process of its own, on
    # the CPU, it neither joins nor starts a process group and sets neither the current device nor
    # the number of threads.
    with patch_environment(LOCAL_RANK=-1, ACCELERATE_TORCH_DEVICE="cpu"):
        PartialState()
    tracker: Tracker = LOGGER_TYPE_TO_CLASS[name](**options[name])
    return tracker


def _installed() -> set[str]:
    if find_spec("accelerate") is None:
        return set()
    from accelerate.tracking import get_available_trackers

    return {str(tracker) for tracker in get_available_trackers()}
