"""The settings that a run chooses itself, and their bounds."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from adloco.algorithms.method import Batching, Method
from adloco.algorithms.stage import Option
from adloco.errors import require, require_range, require_setting
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.merge import MergePolicy
from adloco.rules.sync_schedule import Streaming


@dataclass(frozen=True, kw_only=True)
class Auto(Option):
    """Settings that the run chooses for the least time to a loss, and their bounds."""

    key: ClassVar[str] = "auto"
    section: ClassVar[str] = "auto"
    stage: ClassVar[str] = "adloco.lab.auto.stage:AutoStage"

    chooses: tuple[Literal["sync_every", "eta", "multiplier"], ...] = ()
    """Settings that the run chooses from its own seconds of steps and syncs, and its noise scale:
    sync_every (of [method]), eta (of batch.rule norm-test), multiplier (of [switch]). It begins
    with what the recipe says of them.
    """

    every: int = 5
    """Rounds from one choice to the next. A choice uses the medians of the rounds since the last.
    """
    eta_minimum: float = 0.2
    """Smallest batch.eta that is chosen."""
    eta_maximum: float = 5.0
    """Largest batch.eta that is chosen."""
    multiplier_maximum: float = 4.0
    """Largest switch.multiplier that is chosen; the smallest is 1."""
    sync_every_minimum: int = 1
    """Smallest method.sync_every that is chosen. With streaming it is at least fragments x
    (tau + 1)."""
    sync_every_maximum: int = 500
    """Largest method.sync_every that is chosen."""
    sync_cost: float = 0.1
    """Exponent with which the samples to a loss grow with H: 0.1 means that a doubled H needs 7%
    more samples. It is also the share of the time that syncs take at the best H. Our runs needed
    samples as H^0.04 between H = 1 and 50, and as H^0.13 between 50 and 150."""

    def __post_init__(self) -> None:
        require_range(self, "every", "multiplier_maximum", "sync_every_minimum", at_least=1)
        require_range(self, "eta_minimum", above=0)
        require_setting(
            self.eta_maximum >= self.eta_minimum, self, "eta_maximum", "must be >= {eta_minimum=}"
        )
        require_setting(
            self.sync_every_maximum >= self.sync_every_minimum,
            self,
            "sync_every_maximum",
            "must be >= {sync_every_minimum=}",
        )
        require_range(self, "sync_cost", above=0, below=1)

    @property
    def active(self) -> bool:
        return bool(self.chooses)

    def check(
        self, method: Method, batching: Batching, streaming: Streaming, policy: MergePolicy
    ) -> None:
        rule, switch = batching.rule, batching.switch
        if "eta" in self.chooses:
            require(
                isinstance(rule, NormTest),
                "auto.chooses must not have eta without batch.rule norm-test, whose "
                "noise scale the least time is computed from",
            )
        if "multiplier" in self.chooses:
            require(
                switch.mode == "switch",
                f"auto.chooses must not have multiplier where switch.mode is {switch.mode}, which "
                "does not use it",
            )
            require(
                isinstance(rule, NormTest),
                "auto.chooses must not have multiplier without batch.rule norm-test, whose noise "
                "scale it follows",
            )
        if "sync_every" not in self.chooses:
            return
        require(
            method.syncs(policy),
            "auto.chooses must not have sync_every where no trainer ever has two workers, because "
            "nothing is synced; give method.workers_per_trainer more than 1",
        )
        require(
            method.sync_growth == 0,
            "method.sync_growth must be 0 where auto.chooses has sync_every, because only one of "
            f"them can set the length of a round, got {method.sync_growth}",
        )
        require(
            self.sync_every_maximum >= streaming.fewest_steps,
            f"auto.sync_every_maximum must be >= {streaming.fewest_steps}, the fewest inner steps "
            f"of a round with streaming.fragments = {streaming.fragments} and streaming.tau = "
            f"{streaming.tau}, got {self.sync_every_maximum}",
        )
