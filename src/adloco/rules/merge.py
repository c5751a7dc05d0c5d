"""Which trainers merge, and where the freed workers go (AdLoCo section 3.2, arXiv 2508.18182;
DESIGN section 4).

A trainer that asks for a small batch is far from its noise floor and holds back nothing by being
merged; the published policy therefore merges the trainers with the smallest requests, by an average
weighted with these requests. The survivor is the one with the largest request among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A decision: these trainers become one."""

    survivor: int
    absorbed: tuple[int, ...]
    weights: Mapping[int, float]
    """Of every merged trainer, the survivor included: its request over the sum of the requests."""


class MergePolicy(Protocol):
    """Decides merges. Pure: the same requests give the same merge on every rank."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        """The merge at the end of this round (counted from 1), or None. requests: requested batch
        of each living trainer, by id.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NoMerge:
    """Trainers never merge."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        return None


@dataclass(frozen=True, kw_only=True)
class _Timed:
    count: int = 2
    """How many trainers become one at each merge (w)."""
    every: int = 3
    """Rounds from one merge to the next."""
    first_round: int = 3
    """Round after which the first merge happens."""

    def __post_init__(self) -> None:
        require(self.count >= 2, f"merge.count must be >= 2, got {self.count}")
        require(self.every >= 1, f"merge.every must be >= 1, got {self.every}")
        require(self.first_round >= 1, f"merge.first_round must be >= 1, got {self.first_round}")

    def _due(self, round: int) -> bool:
        return round >= self.first_round and (round - self.first_round) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class MergeSmallest(_Timed):
    """Merge the `count` trainers with the smallest requests (as published)."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        if not self._due(round) or len(requests) < 2:
            return None
        return _merge(_by_request(requests)[: self.count], requests)


@dataclass(frozen=True, kw_only=True)
class MergeLargestWithSmallest(_Timed):
    """Merge the trainer with the largest request with the `count` - 1 that have the smallest."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        if not self._due(round) or len(requests) < 2:
            return None
        ranked = _by_request(requests)
        return _merge([*ranked[: min(self.count, len(ranked)) - 1], ranked[-1]], requests)


def assign_workers(
    requests: Mapping[int, int], current: Mapping[int, int], freed: int
) -> list[int]:
    """Trainer id for each freed worker, in proportion to the requests.

    Each in turn goes to the trainer with the largest request per worker it would then have
    (D'Hondt's rule), ties to the smallest id. Nobody loses a worker, so no trainer is ever left
    without one. current: number of workers of each living trainer.
    """
    counts = dict(current)
    chosen = []
    for _ in range(freed):
        trainer = max(
            sorted(counts), key=lambda candidate: requests[candidate] / (counts[candidate] + 1)
        )
        counts[trainer] += 1
        chosen.append(trainer)
    return chosen


def _by_request(requests: Mapping[int, int]) -> list[int]:
    """Trainer ids, smallest request first, ties by id."""
    return sorted(requests, key=lambda trainer: (requests[trainer], trainer))


def _merge(members: list[int], requests: Mapping[int, int]) -> Merge:
    # Among equal largest requests the smallest id survives, so that identical trainers keep the
    # first name.
    survivor = max(members, key=lambda trainer: (requests[trainer], -trainer))
    total = sum(requests[trainer] for trainer in members)
    return Merge(
        survivor=survivor,
        absorbed=tuple(sorted(set(members) - {survivor})),
        weights={trainer: requests[trainer] / total for trainer in sorted(members)},
    )
