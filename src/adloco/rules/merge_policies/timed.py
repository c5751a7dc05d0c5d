"""Code that the merge policies share: when merges happen, and the merge of given trainers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adloco.errors import require_range
from adloco.rules.merge import Merge


@dataclass(frozen=True, kw_only=True)
class TimedMerge(ABC):
    """A policy that merges at fixed intervals of rounds.

    A subclass says who merges: `smallest` the first `count` of the trainers by rising request,
    `largest-with-smallest` the first `count` - 1 and the last. The member with the largest request
    survives, and the members are weighted by their requests.
    """

    count: int = 2
    """Number of trainers that become one at each merge (w)."""
    every: int = 3
    """Rounds from one merge to the next."""
    first_round: int = 3
    """Round (counted from 1) at whose end the first merge happens."""

    def __post_init__(self) -> None:
        require_range(self, "count", at_least=2)
        require_range(self, "every", "first_round", at_least=1)

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        due = round >= self.first_round and (round - self.first_round) % self.every == 0
        if not due or len(requests) < 2:
            return None
        ranked = sorted(requests, key=lambda trainer: (requests[trainer], trainer))
        members = self.members(ranked)
        # Among equal requests, the smallest id survives.
        survivor = max(members, key=lambda trainer: (requests[trainer], -trainer))
        total = sum(requests[trainer] for trainer in members)
        return Merge(
            survivor=survivor,
            absorbed=tuple(sorted(set(members) - {survivor})),
            weights={trainer: requests[trainer] / total for trainer in sorted(members)},
        )

    @abstractmethod
    def members(self, ranked: Sequence[int]) -> list[int]:
        """The trainers that merge.

        ranked: Ids of all trainers by rising request; ties by id.
        """
