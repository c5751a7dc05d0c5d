"""Merge the trainers with the smallest requests, as published (AdLoCo section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.merge_policies.timed import TimedMerge


@dataclass(frozen=True, kw_only=True)
class MergeSmallest(TimedMerge):
    """Merge the `count` trainers with the smallest requests (as published)."""

    key: ClassVar[str] = "smallest"

    def members(self, ranked: Sequence[int]) -> list[int]:
        return list(ranked[: self.count])
