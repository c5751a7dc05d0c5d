"""The experiment trackers that follow a run beside metrics.jsonl.

They run in rank 0 alone. A tracker that fails is left out, and training continues. Their step is
the number of tokens, because steps change meaning when batches grow.
"""

import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adloco.config.settings import TRACKERS
from adloco.errors import RunWarning, require
from adloco.metrics import Record
from adloco.tracking.tracker import Tracker, TrackerSettings
from adloco.tracking.with_accelerate import state_kept

TENSORBOARD = "tensorboard"


class Trackers:
    """The trackers of a run; one that fails is left out.

    names: See `run.trackers`.

    Raises:
        ValueError: One of them is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        installed = _installed() if names else set()
        self._names = (
            [TENSORBOARD] * (TENSORBOARD in installed) if list(names) == ["auto"] else list(names)
        )
        for name in self._names:
            require(
                name in installed or ":" in name,
                f"run.trackers names {name}, which is not installed; pip install 'adloco[{name}]', "
                "or leave it out",
            )
        self._folder = folder
        self._following: dict[str, Tracker] = {}

    @contextmanager
    def following(self, settings: Mapping[str, Any], tokens: int) -> Iterator[None]:
        """Open the trackers with the run's settings, and close them when the context ends.

        Args:
            settings: Every setting by `section.key`.
            tokens: Tokens trained on so far; more than 0 when a run is resumed.
        """
        plain = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in settings.items()
        }
        with state_kept() if self._names and find_spec("accelerate") else nullcontext():
            for name in self._names:
                with self._left_out_on_error(name), _no_questions():
                    chosen: TrackerSettings = TRACKERS.find(name)()
                    self._following[name] = chosen.open(self._folder, plain, tokens)
            try:
                yield
            finally:
                for name, tracker in list(self._following.items()):
                    with self._left_out_on_error(name):
                        tracker.finish()

    def log(self, record: Record) -> None:
        """Send the numbers of a round to every tracker."""
        values = scalars(record)
        for name, tracker in list(self._following.items()):
            with self._left_out_on_error(name):
                tracker.log(dict(values), step=record["tokens"])

    @contextmanager
    def _left_out_on_error(self, name: str) -> Iterator[None]:
        """Turn an error of this tracker into a warning, and use the tracker no longer."""
        try:
            yield
        except (Exception, SystemExit) as error:  # Some end the process where they fail.
            self._following.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"tracker {name} failed and is left out from here on: {reason}",
                RunWarning,
                stacklevel=2,
            )


@contextmanager
def _no_questions() -> Iterator[None]:
    """Let the process have no terminal to ask at: the live view would cover the question, as W&B's
    for a key, and training would wait for the answer.
    """
    terminal = sys.stdin
    with Path(os.devnull).open() as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = terminal


def scalars(record: Record) -> dict[str, float]:
    """The finite numbers in a line of metrics.jsonl, by the names of `flat`."""
    return {
        name: float(value)
        for name, value in flat(record).items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def flat(record: Record) -> dict[str, Any]:
    """The values in a line of metrics.jsonl, by names such as train_loss, sync/bytes,
    trainer-0/wire_error and worker-0/busy_seconds.
    """
    rows = {"": record, "sync/": record["sync"]}
    for kind in ("trainer", "worker", "island"):
        rows |= {f"{kind}-{row[kind]}/": row for row in record.get(f"{kind}s", ())}
    rows |= {f"memory-{phase}/": row for phase, row in record["memory"].items()}
    return {
        prefix + key: value
        for prefix, row in rows.items()
        for key, value in row.items()
        if not isinstance(value, (list, dict))
    }


def _installed() -> set[str]:
    if find_spec("accelerate") is None:
        return set()
    from accelerate.tracking import get_available_trackers

    return {str(tracker) for tracker in get_available_trackers()}
