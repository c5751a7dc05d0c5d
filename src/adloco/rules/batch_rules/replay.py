"""The batches of another run, replayed: the same curve without the gradients that led to it."""

import bisect
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from adloco.errors import require
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate


@dataclass(frozen=True, kw_only=True)
class ReplayBatch:
    """The batch is what a trainer of another run requested after as many samples."""

    key: ClassVar[str] = "replay"

    replayed_run: str
    """Folder of the other run; it is read again when this run is resumed."""
    replayed_trainer: int = 0
    """The trainer whose requests are taken."""

    needs_moments = False
    inner_products = None

    def __post_init__(self) -> None:
        require(
            bool(_requests(self.replayed_run, self.replayed_trainer)),
            f"replayed_run {self.replayed_run!r} has no requests of trainer "
            f"{self.replayed_trainer} in metrics.jsonl; name a run folder and one of its trainers",
        )

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        requests = _requests(self.replayed_run, self.replayed_trainer)
        begun = bisect.bisect_right([start for start, _ in requests], point.samples)
        return requests[max(0, begun - 1)][1]


@functools.cache
def _requests(folder: str, trainer: int) -> tuple[tuple[int, int], ...]:
    """(samples of the trainer before the round, its requested batch in the round), by round."""
    found, seen, steps_before = [], 0, 0
    try:
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
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"replayed_run {folder!r} cannot be read ({error}); restore its metrics.jsonl, or "
            "name another run"
        ) from error
    return tuple(found)
