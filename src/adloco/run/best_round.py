"""The round with the lowest validation loss, whose checkpoint `run.keep_best` keeps."""

import math
from collections.abc import Collection, Iterable

from adloco.metrics import Record
from adloco.run.checkpoint import best_name, losses_of


class BestRound:
    """Knows the losses of the rounds that have checkpoints, and the lowest of all rounds.

    Args:
        removes: True if this process removes checkpoints; others need only the lowest loss.
    """

    def __init__(self, *, removes: bool) -> None:
        self._removes = removes
        self._losses: dict[str, float] = {}
        self._lowest = math.inf

    def add(self, records: Iterable[Record]) -> bool:
        """Take the next lines of metrics.jsonl; True if one has the lowest loss so far."""
        found = losses_of(records)
        before, self._lowest = self._lowest, min([self._lowest, *found.values()])
        if self._removes:
            self._losses |= found
        return self._lowest < before

    def spared(self, names: Collection[str]) -> str:
        """The one of these checkpoints that stays; empty if none of them was evaluated."""
        newest = max(names, default="")
        # A round before the newest checkpoint that has none gets none any more.
        self._losses = {
            name: loss for name, loss in self._losses.items() if name in names or name > newest
        }
        return best_name(names, self._losses)
