"""Merges: what happens to the things that trainers own, and where the freed workers go (AdLoCo
section 3.2, arXiv 2508.18182; docs/method.md). `merge_policies/timed.py` decides when trainers
merge, and its subclasses there who.

A trainer that requests a small batch is far from its noise floor, so little is lost if it is
merged. The published policy therefore merges the trainers with the smallest requests. Their
parameters are averaged with the requests as weights. The survivor is the trainer with the largest
request among them; the others are absorbed, and their workers are freed for other trainers.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from adloco.errors import require, require_choices


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

    def checked(self, living: Collection[int]) -> "Merge":
        """The merge in Python's numbers, where it has NumPy's, too; ValueError unless it joins
        different living trainers, with weights for them alone that add up to 1.
        """
        merged = [self.survivor, *self.absorbed]
        weights = self.weights.values()
        require(
            len(merged) == len({*merged} & {*living}) > 1
            and self.weights.keys() == {*merged}
            and all(weight >= 0 for weight in weights)
            and math.isclose(sum(weights), 1, rel_tol=1e-5),
            "merge.policy must name a survivor and other trainers, each once, of "
            f"{sorted(living)}, and a weight for each of these alone that add up to 1, got {self}",
        )
        return Merge(
            survivor=int(self.survivor),
            absorbed=tuple(sorted(map(int, self.absorbed))),
            weights={int(trainer): float(weight) for trainer, weight in self.weights.items()},
        )


@runtime_checkable
class MergePolicy(Protocol):
    """Decides merges. `decide` is pure: the same requests give the same merge on every rank."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        """The merge at the end of a round; None if there is none.

        Args:
            round: Number of the round, from 1.
            requests: Requested batch of each living trainer by id, in samples.
        """


@dataclass(frozen=True, kw_only=True)
class MergeFates:
    """Fate of each thing that trainers own when they merge."""

    parameters: Literal["weighted", "uniform", "survivor"] = "weighted"
    """Global parameters. weighted: the merged trainers' mean, weighted by requested batch; uniform:
    their plain mean; survivor: the survivor's own.
    """
    outer_momentum: Literal["weighted", "survivor", "reset"] = "weighted"
    """State of the outer optimizer. weighted: the merged trainers' mean, weighted by requested
    batch; survivor: the survivor's own; reset: empty, as at the start."""
    inner_state: Literal["keep", "mean", "reset"] = "keep"
    """Inner optimizer state of the merged trainers' workers. keep: each worker keeps its own; mean:
    their mean, weighted by requested batch; reset: empty, as at the start."""
    streams: Literal["keep", "balance"] = "keep"
    """keep: each worker keeps its data stream; balance: the least-read streams go to the trainers
    with the largest requests per worker.
    """
    requested_batch: Literal["survivor", "weighted", "sum"] = "survivor"
    """survivor: the survivor's own; weighted: the merged trainers' mean, weighted by requested
    batch; sum: their sum. At most batch.maximum.
    """

    def __post_init__(self) -> None:
        require_choices(self)


def assign_workers(
    requests: Mapping[int, int], current: Mapping[int, int], freed: int
) -> list[int]:
    """Choose a trainer for each freed worker, in proportion to the requests.

    The workers are given out one by one. Each goes to the trainer whose request, divided by the
    number of workers it would then have, is largest (D'Hondt's rule); ties go to the smallest id.

    current: Number of workers that each living trainer has already, by id. It keeps them.
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
