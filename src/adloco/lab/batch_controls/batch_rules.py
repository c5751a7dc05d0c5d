"""Batches that change without a reason: controls for batches that follow the gradient."""

import bisect
import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from adloco.errors import SettingError, require_range, require_setting
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class CyclicBatch:
    """The batch goes through a list of sizes, each for the same number of samples."""

    key: ClassVar[str] = "cyclic"

    cycle: Sequence[int]
    """Requested batches of one cycle, in samples."""
    each_samples: int
    """Samples of the trainer for which each of them is requested."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        require_setting(
            min(self.cycle, default=0) > 0, self, "cycle", "must hold batches > 0, and at least one"
        )
        require_range(self, "each_samples", above=0)

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        return self.cycle[point.samples // self.each_samples % len(self.cycle)]


@dataclass(frozen=True, kw_only=True)
class RandomBatch:
    """The batch is drawn after each round, evenly between two sizes. A draw depends on the run's
    seed and on the samples that the trainer has seen.
    """

    key: ClassVar[str] = "random"

    lowest: int
    """Smallest batch, in samples."""
    highest: int
    """Largest batch, in samples; the mean is halfway between both."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        require_setting(
            0 < self.lowest <= self.highest, self, "lowest", "must be > 0 and <= {highest=}"
        )

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        draw = random.Random(f"{point.seed} {point.samples}")
        return draw.randint(self.lowest, self.highest)


@dataclass(frozen=True, kw_only=True)
class ReplayBatch:
    """The batch is what a trainer of another run requested after as many samples."""

    key: ClassVar[str] = "replay"

    replayed_run: str
    """Folder of the other run; it is read again when this run is resumed."""
    replayed_trainer: int = 0
    """The trainer whose requests are taken."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        try:
            requests = _requests(self.replayed_run, self.replayed_trainer)
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            problem = (
                f"{self.replayed_run!r} cannot be read ({error}); restore its metrics.jsonl, or "
            )
            raise SettingError(self, "replayed_run", f"{problem}name another run") from error
        require_setting(
            bool(requests),
            self,
            "replayed_run",
            "must be a run folder with requests of {replayed_trainer=} in metrics.jsonl",
        )

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        requests = _requests(self.replayed_run, self.replayed_trainer)
        begun = bisect.bisect_right([start for start, _ in requests], point.samples)
        return requests[max(0, begun - 1)][1]


@functools.cache
def _requests(folder: str, trainer: int) -> tuple[tuple[int, int], ...]:
    """(samples of the trainer before the round, its requested batch in the round), by round."""
    found, seen, steps_before = [], 0, 0
    path = Path(folder).expanduser() / "metrics.jsonl"
    if not path.is_file():
        return ()
    # A run that was killed while writing leaves an incomplete last line.
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        record = json.loads(line)
        steps = record["inner_steps"] - steps_before
        steps_before = record["inner_steps"]
        for row in record["trainers"]:
            if row["trainer"] == trainer:
                found.append((int(seen), int(row["requested_batch"])))
                seen += row["trainer_batch"] * steps
    return tuple(found)
