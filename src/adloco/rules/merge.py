"""Which trainers merge, and where the freed workers go (AdLoCo section 3.2, arXiv 2508.18182;
docs/method.md).

A trainer that requests a small batch is far from its noise floor, so little is lost if it is
merged. The published policy therefore merges the trainers with the smallest requests. Their
parameters are averaged with the requests as weights. The survivor is the trainer with the largest
request among them; the others are absorbed, and their workers are freed for other trainers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The decision that some trainers become one."""

    survivor: int
    """Id of the trainer that continues."""
    absorbed: tuple[int, ...]
    """Ids of the trainers that end, in rising order."""
    weights: Mapping[int, float]
    """Weight of each merged trainer by id, the survivor included: its request over the sum of their
    requests."""


class MergePolicy(Protocol):
    """Decides merges. `decide` is pure: the same requests give the same merge on every rank."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        """The merge at the end of a round; None if there is none.

        Args:
            round: Number of the round, from 1.
            requests: Requested batch of each living trainer by id, in samples.
        """
        ...


def assign_workers(
    requests: Mapping[int, int], current: Mapping[int, int], freed: int
) -> list[int]:
    """Choose a trainer for each freed worker, in proportion to the requests.

    The workers are given out one by one. Each goes to the trainer whose request, divided by the
    number of workers it would then have, is largest (D'Hondt's rule); ties go to the smallest id.

    Args:
        requests: Requested batch of each living trainer by id.
        current: Number of workers that each living trainer has already, by id. It keeps them.
        freed: Number of workers to give out.

    Returns:
        A trainer id for each freed worker.
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
