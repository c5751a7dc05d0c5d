"""Merge the trainer with the largest request and those with the smallest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.merge import Merge
from adloco.rules.merge_policies.timed import TimedMerge, by_request, merge_of


@dataclass(frozen=True, kw_only=True)
class MergeLargestWithSmallest(TimedMerge):
    """Merge the trainer with the largest request and the `count` - 1 with the smallest."""

    key: ClassVar[str] = "largest-with-smallest"

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        if not self.due(round) or len(requests) < 2:
            return None
        ranked = by_request(requests)
        return merge_of([*ranked[: min(self.count, len(ranked)) - 1], ranked[-1]], requests)
