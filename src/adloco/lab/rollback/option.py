"""The settings of spikes of the loss: what is one, and what to do about it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from adloco.algorithms.stage import Option
from adloco.errors import require_choices, require_range
from adloco.metric import COUNT, Metric, Unit
from adloco.rules.failure_signs import Sign
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class Spikes(Option):
    """The answer to an inner step whose loss is far above those before."""

    key: ClassVar[str] = "rollback"
    section: ClassVar[str] = "run"
    stage: ClassVar[str] = "adloco.lab.rollback.stage:RollbackStage"
    trainer_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("spikes", "spikes of the loss", COUNT, aggregation="sum", always=True),
        Metric("spike_step", "inner step of the highest spike", COUNT),
        Metric("spike_deviations", "highest spike", Unit("standard deviations", ".1f")),
        Metric("rolled_back", "rolled back", COUNT, aggregation="sum", always=True),
    )

    on_spike: Literal["report", "rollback", "off"] = setting("report", resume="recorded")
    """Action when the loss of a trainer's inner step is far above its running mean. report: warn;
    rollback: also undo the trainer's round: parameters and optimizer states are those of the
    round's start, and its data is not read again (takes memory for a copy of them); off: nothing.
    """
    spike_deviations: float = setting(6.0, resume="recorded")
    """Standard deviations of the losses above their running mean from which on a loss is far; both
    are over about 100 inner steps.
    """

    def __post_init__(self) -> None:
        require_choices(self)
        require_range(self, "spike_deviations", above=0, below=math.inf)

    @property
    def active(self) -> bool:
        return self.on_spike != "off"

    def copies(self, outer: int, residuals: int, workers: int) -> int:
        """Copies of a round's start: AdamW's moments and residuals of the workers, and the
        trainers' outer state.
        """
        return 2 * workers + residuals + outer if self.on_spike == "rollback" else 0

    @staticmethod
    def events(record: Mapping[str, Any]) -> Iterator[str]:
        for row in record["trainers"]:
            if row.get("spikes"):
                yield _seen(row)

    @staticmethod
    def signs(record: Mapping[str, Any]) -> Iterator[Sign]:
        for row in record["trainers"]:
            if row.get("spikes"):
                yield Sign(
                    kind="loss spike",
                    trainer=row["trainer"],
                    round=record["round"],
                    since=record["round"],
                    seen=_seen(row),
                    meaning="A batch may be bad, or the learning rate too high; a loss that comes "
                    "back by itself has done no harm",
                    advice="If it does not, resume with a lower inner.lr or method.max_grad_norm, "
                    "or with run.on_spike rollback",
                )


def _seen(row: Mapping[str, Any]) -> str:
    """A trainer's spike in words."""
    rolled_back = "; its round was rolled back" if row["rolled_back"] else ""
    return (
        f"the loss of trainer {row['trainer']} at inner step {row['spike_step']} was "
        f"{row['spike_deviations']:.1f} deviations above its running mean{rolled_back}"
    )
