"""The setting of spikes of the loss: what is one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from adloco.algorithms.stage import Option
from adloco.errors import require_range
from adloco.metric import COUNT, Metric, Unit
from adloco.rules.failure_signs import Sign
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class Spikes(Option):
    """Inner steps whose loss is far above those before."""

    key: ClassVar[str] = "spikes"
    section: ClassVar[str] = "run"
    stage: ClassVar[str] = "adloco.lab.spikes.stage:SpikeStage"
    trainer_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("spikes", "spikes of the loss", COUNT, aggregation="sum", always=True),
        Metric("spike_step", "inner step of the highest spike", COUNT),
        Metric("spike_deviations", "highest spike", Unit("standard deviations", ".1f")),
    )

    spike_deviations: float = setting(6.0, resume="recorded")
    """A warning names inner steps whose loss is so many standard deviations above its trainer's
    running mean; both are over about 100 inner steps. 0: none.
    """

    def __post_init__(self) -> None:
        require_range(self, "spike_deviations", at_least=0, below=math.inf)

    @property
    def active(self) -> bool:
        return self.spike_deviations > 0

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
                    "or with a larger data.skip_samples",
                )


def _seen(row: Mapping[str, Any]) -> str:
    """A trainer's spike in words."""
    return (
        f"the loss of trainer {row['trainer']} at inner step {row['spike_step']} was "
        f"{row['spike_deviations']:.1f} deviations above its running mean"
    )
