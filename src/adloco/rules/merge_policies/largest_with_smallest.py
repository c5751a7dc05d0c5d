"""Merge the trainer with the largest request and those with the smallest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.merge_policies.timed import TimedMerge


@dataclass(frozen=True, kw_only=True)
class MergeLargestWithSmallest(TimedMerge):
    """Merge the trainer with the largest request and the `count` - 1 with the smallest."""

    key: ClassVar[str] = "largest-with-smallest"

    def members(self, ranked: Sequence[int]) -> list[int]:
        return [*ranked[: min(self.count, len(ranked)) - 1], ranked[-1]]
