"""Settings of evaluations (recipe section [evaluation])."""

from dataclasses import dataclass

from adloco.errors import require_range
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Frequency of evaluations, and the windows of each. The last round is always evaluated."""

    every: int = setting(1, resume="free", aliases=("eval_every",))
    """Rounds from one evaluation of all trainers to the next."""
    windows: int = setting(64, resume="free", equal="validation windows")
    """Validation windows, evenly spaced over the held-out text; 0: all."""

    def __post_init__(self) -> None:
        require_range(self, "every", above=0)
        require_range(self, "windows", at_least=0)
