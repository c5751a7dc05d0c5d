"""Code that the merge policies share: when merges happen, and the merge of given trainers."""

from collections.abc import Mapping
from dataclasses import dataclass

from adloco.errors import require_range
from adloco.rules.merge import Merge


@dataclass(frozen=True, kw_only=True)
class TimedMerge:
    """A merge policy that merges at fixed intervals of rounds."""

    count: int = 2
    """Number of trainers that become one at each merge (w)."""
    every: int = 3
    """Rounds from one merge to the next."""
    first_round: int = 3
    """Round (counted from 1) at whose end the first merge happens."""

    def __post_init__(self) -> None:
        require_range(self, "count", at_least=2)
        require_range(self, "every", "first_round", at_least=1)

    def due(self, round: int) -> bool:
        """True if a merge happens at the end of this round (counted from 1)."""
        return round >= self.first_round and (round - self.first_round) % self.every == 0


def by_request(requests: Mapping[int, int]) -> list[int]:
    """Trainer ids by rising request; ties by id."""
    return sorted(requests, key=lambda trainer: (requests[trainer], trainer))


def merge_of(members: list[int], requests: Mapping[int, int]) -> Merge:
    """The merge of these trainers, weighted by their requests.

    The trainer with the largest request survives; among equal ones, the one with the smallest id.
    """
    survivor = max(members, key=lambda trainer: (requests[trainer], -trainer))
    total = sum(requests[trainer] for trainer in members)
    return Merge(
        survivor=survivor,
        absorbed=tuple(sorted(set(members) - {survivor})),
        weights={trainer: requests[trainer] / total for trainer in sorted(members)},
    )
