"""Which trainers merge, and where the freed workers go (AdLoCo section 3.2, arXiv 2508.18182;
DESIGN section 4).

A trainer that asks for a small batch is far from its noise floor and holds back nothing by being
merged; the published policy therefore merges the trainers with the smallest requests, by an average
weighted with these requests. The survivor is the one with the largest request among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A decision: these trainers become one."""

    survivor: int
    absorbed: tuple[int, ...]
    weights: Mapping[int, float]
    """Weight of each merged trainer, the survivor included: its part of the sum of the requests."""


class MergePolicy(Protocol):
    """Decides merges. Pure: the same requests give the same merge on every rank."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        """The merge at the end of this round (counted from 1), or None. requests: requested batch
        of each living trainer, by id.
        """
        ...


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
