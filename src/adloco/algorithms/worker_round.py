"""A worker's record of a round: kept while it trains, and gathered by all ranks at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    loss_sum: float = 0.0
    """Sum of the losses of its samples; set at the end of the round."""
    samples: float = 0.0
    """Samples that it trained on."""
    sync: SyncStats = field(default_factory=SyncStats)
    """Cost of its syncs."""
    moments: Moments = field(default_factory=Moments)
    """The worker's gradient statistics."""
    skipped_steps: float = 0.0
    """Inner steps that it left out, because they were not finite."""
    restarts: float = 0.0
    """Number of restarts from the parameters of the last sync."""
    losses: list[float] = field(default_factory=list)
    """Loss of each inner step."""

    def to_numbers(self) -> list[float]:
        """The numbers as float64 scalars, in which form ranks gather them."""
        own = [self.busy_seconds, self.turn_seconds, self.loss_sum, self.samples]
        pooled = [*self.sync.to_numbers(), *self.moments.to_numbers()]
        return [*own, *pooled, self.skipped_steps, self.restarts, *self.losses]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> "WorkerRound":
        """The inverse of `to_numbers`."""
        sync = 4 + len(fields(SyncStats))
        moments = sync + len(fields(Moments))
        return WorkerRound(
            busy_seconds=numbers[0],
            turn_seconds=numbers[1],
            loss_sum=numbers[2],
            samples=numbers[3],
            sync=SyncStats.from_numbers(numbers[4:sync]),
            moments=Moments.from_numbers(numbers[sync:moments]),
            skipped_steps=numbers[moments],
            restarts=numbers[moments + 1],
            losses=list(numbers[moments + 2 :]),
        )

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "WorkerRound":
        """The inverse of `dataclasses.asdict`, in which form the numbers are saved."""
        own = {
            "sync": SyncStats(**state["sync"]),
            "moments": Moments(**state["moments"]),
            "losses": list(state["losses"]),
        }
        return WorkerRound(**{**state, **own})
