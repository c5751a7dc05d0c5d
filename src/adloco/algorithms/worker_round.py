"""A worker's record of a round: kept while it trains, and gathered by all ranks at the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

from adloco.distributed.comm.sync_stats import SyncStats
from adloco.rules.moments import Moments


@dataclass(kw_only=True)
class WorkerRound:
    """A worker's numbers of one round."""

    busy_seconds: float = 0.0
    """Seconds of its inner steps."""
    turn_seconds: float = 0.0
    """`busy_seconds` times the turns in which its rank's workers run: 1 if all run at once, 2 if
    they take twice as long as the slowest of them. Set at the end of the round."""
    rank_seconds: float = 0.0
    """Seconds of its rank's inner steps, of all workers there; not gathered."""
    sync: SyncStats = field(default_factory=SyncStats)
    moments: Moments = field(default_factory=Moments)
    skipped_steps: float = 0.0
    """Inner steps that it left out, because they were not finite."""
    restarts: float = 0.0
    """Number of restarts from the parameters of the last sync."""
    batches: list[int] = field(default_factory=list)
    """Samples of each inner step. They may differ within a round: where the budget ends, and where
    a round that was stopped continues without workers that were dropped."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each inner step; of one that was left out not finite."""

    @property
    def samples(self) -> int:
        """Samples that it trained on."""
        return sum(self.batches)

    @property
    def loss_sum(self) -> float:
        """Sum of the losses of its samples, with the mean in place of losses that are not finite;
        nan if none is.
        """
        steps = zip(self.losses, self.batches, strict=True)
        finite = [(loss, batch) for loss, batch in steps if math.isfinite(loss)]
        if not finite:
            return math.nan
        mean = sum(loss * batch for loss, batch in finite) / sum(batch for _, batch in finite)
        return mean * self.samples

    def to_numbers(self) -> list[float]:
        """The numbers as float64 scalars, in which form ranks gather them; without the batches,
        which all ranks know.
        """
        own = [self.busy_seconds, self.turn_seconds, self.skipped_steps, self.restarts]
        return [*own, *astuple(self.sync), *astuple(self.moments), *self.losses]

    @staticmethod
    def from_numbers(numbers: Sequence[float], batches: Sequence[int]) -> "WorkerRound":
        """The inverse of `to_numbers`."""
        sync = 4 + len(fields(SyncStats))
        moments = sync + len(fields(Moments))
        return WorkerRound(
            busy_seconds=numbers[0],
            turn_seconds=numbers[1],
            skipped_steps=numbers[2],
            restarts=numbers[3],
            sync=SyncStats(*numbers[4:sync]),
            moments=Moments(*numbers[sync:moments]),
            losses=list(numbers[moments:]),
            batches=list(batches),
        )

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "WorkerRound":
        """The inverse of `dataclasses.asdict`, in which form the numbers are saved."""
        own = {
            "sync": SyncStats(**state["sync"]),
            "moments": Moments(**state["moments"]),
            "batches": list(state["batches"]),
            "losses": list(state["losses"]),
        }
        return WorkerRound(**{**state, **own})
