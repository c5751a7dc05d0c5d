"""Merge the trainers with the smallest requests, as published (AdLoCo section 3.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.merge import Merge
from adloco.rules.merge_policies.timed import TimedMerge, by_request, merge_of


@dataclass(frozen=True, kw_only=True)
class MergeSmallest(TimedMerge):
    """Merge the `count` trainers with the smallest requests (as published)."""

    key: ClassVar[str] = "smallest"

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        if not self.due(round) or len(requests) < 2:
            return None
        return merge_of(by_request(requests)[: self.count], requests)
