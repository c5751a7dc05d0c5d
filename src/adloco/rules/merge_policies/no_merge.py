"""No merges."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from adloco.rules.merge import Merge


@dataclass(frozen=True, kw_only=True)
class NoMerge:
    """Trainers never merge."""

    key: ClassVar[str] = "none"

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        return None
