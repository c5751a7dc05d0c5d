"""The settings of a run that chooses H itself."""

from dataclasses import dataclass
from typing import ClassVar

from adloco.algorithms.method import Batching, Method
from adloco.algorithms.stage import Option
from adloco.errors import require, require_range
from adloco.rules.merge import MergePolicy
from adloco.rules.sync_schedule import Streaming


@dataclass(frozen=True, kw_only=True)
class Auto(Option):
    """Whether and how the run chooses H for the least time to a loss."""

    key: ClassVar[str] = "auto"
    section: ClassVar[str] = "auto"
    stage: ClassVar[str] = "adloco.lab.auto.stage:AutoStage"

    sync_interval: bool = False
    """true: the run chooses H from its own seconds of steps and syncs, from 1 (with streaming:
    fragments x (tau + 1)) to 500; it begins with method.sync_every.
    """
    every: int = 5
    """Rounds from one choice to the next. A choice uses the medians of the rounds since the last.
    """
    sync_cost: float = 0.1
    """Exponent with which the samples to a loss grow with H: 0.1 means that a doubled H needs 7%
    more samples. It is also the share of the time that syncs take at the best H. Our runs needed
    samples as H^0.04 between H = 1 and 50, and as H^0.13 between 50 and 150."""

    def __post_init__(self) -> None:
        require_range(self, "every", at_least=1)
        require_range(self, "sync_cost", above=0, below=1)

    @property
    def active(self) -> bool:
        return self.sync_interval

    @property
    def chooses_sync_every(self) -> bool:
        return self.sync_interval

    def check(
        self, method: Method, batching: Batching, streaming: Streaming, policy: MergePolicy
    ) -> None:
        if not self.sync_interval:
            return
        require(
            method.syncs(policy),
            "auto.sync_interval must be false where no trainer ever has two workers, because "
            "nothing is synced; give method.workers_per_trainer more than 1",
        )
        require(
            method.sync_growth == 0,
            "method.sync_growth must be 0 with auto.sync_interval, because only one of them can "
            f"set the length of a round, got {method.sync_growth}",
        )
