"""Every few rounds the run chooses H again, for the least time to a loss.

The samples to a loss grow as H^cost, so the seconds to it as H^cost (t + s / H), with t the seconds
of an inner step and s those for which a sync stops training. The derivative is zero at
H = s (1 - cost) / (cost t), where syncs take the share `cost` of the time.

The choice is a function of the numbers of past rounds, which all ranks have, so that all ranks
choose the same.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from adloco.lab.auto.option import Auto
from adloco.rules.chosen import Change

LARGEST_FACTOR = 2.0
"""A choice rests on what was measured near the value before, so it changes by no more at a time."""
HYSTERESIS = 0.2
"""Relative change below which H stays unchanged. The time to a loss is flat around its least: with
an H that is wrong by a fifth it is longer by less than 0.2%."""
LONGEST = 500
"""The largest H that is chosen, unless streaming needs more."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """Measured numbers of a round that tell the time of others."""

    step_seconds: float
    """Seconds of an inner step on the slowest rank."""
    sync_seconds: float | None
    """Seconds that the last worker to arrive stopped for syncs, so waiting for others is not in
    them; None if no trainer had two workers."""


class AutoController:
    """Chooses H every few rounds, from the rounds since the last choice.

    Args:
        auto: How often, and what a larger H costs.
        fewest_steps: The smallest H that the schedule of syncs allows.
    """

    def __init__(self, auto: Auto, *, fewest_steps: int = 1) -> None:
        self._auto = auto
        self._rounds: list[MeasuredRound] = []
        self._bounds = fewest_steps, max(fewest_steps, LONGEST)

    def within_bounds(self, first: int) -> int:
        """H of the first round."""
        lowest, highest = self._bounds
        return min(max(first, lowest), highest)

    def update(self, before: int, measured: MeasuredRound, rounds_done: int) -> Change | None:
        """Take in a round and, if it is time, choose again.

        Args:
            before: H in force in the round.
            measured: The round's numbers.
            rounds_done: Complete rounds of the run, including this one.

        Returns:
            The new H with the reason; None if it stays.
        """
        # The first round has what happens once: connections, memory, caches.
        if rounds_done > 1:
            self._rounds = [*self._rounds, measured][-self._auto.every :]
        syncs = [row.sync_seconds for row in self._rounds if row.sync_seconds is not None]
        sync = median(syncs) if syncs else 0.0
        if rounds_done % self._auto.every or not sync:
            return None
        step = median(row.step_seconds for row in self._rounds)
        cost = self._auto.sync_cost
        wanted = sync * (1 - cost) / (cost * step) if step else math.inf
        after = round(paced(before, wanted, *self._bounds))
        share = sync / (before * step + sync)
        reason = f"syncs take {share:.0%} of the time, and {cost:.0%} is best"
        change = Change(setting="sync_every", before=before, after=after, reason=reason)
        return change if after != before else None

    def forget(self) -> None:
        """Forget the rounds so far: a merge has changed which workers serve a trainer."""
        self._rounds = []

    def state_dict(self) -> dict[str, Any]:
        """The remembered rounds; the H in force is part of the run's state."""
        return {"rounds": [asdict(row) for row in self._rounds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._rounds = [MeasuredRound(**row) for row in state["rounds"]]


def paced(before: float, wanted: float, lowest: float, highest: float) -> float:
    """The new value of a setting: nearer to what is wanted, by no more than `LARGEST_FACTOR`.

    It is the value before if what is wanted, brought within the bounds, differs by `HYSTERESIS` or
    less.
    """
    goal = min(max(wanted, lowest), highest)
    if max(goal / before, before / goal) <= 1 + HYSTERESIS:
        return before
    return min(max(goal, before / LARGEST_FACTOR), before * LARGEST_FACTOR)
