"""Every few rounds the run chooses settings again, within bounds, for the least time to a loss.

What is best is in `least_time.py`; here is when and how far they change. The choice is a function
of the numbers of past rounds, which all ranks have, so that all ranks choose the same.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from adloco.lab.auto.least_time import (
    StepSeconds,
    fastest_batch,
    fastest_multiplier,
    fastest_sync_every,
    fit_step_seconds,
)
from adloco.lab.auto.option import Auto
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.chosen import Change, Chosen

LARGEST_FACTOR = 2.0
"""A choice rests on what was measured near the value before, so it changes by no more at a time."""
HYSTERESIS = 0.2
"""Relative change below which a setting stays unchanged. The time to a loss is flat around its
least: with an H that is wrong by a fifth it is longer by less than 0.2%."""


REMEMBERED = 4
"""The seconds of steps are fitted to the rounds since so many choices, whose batches may differ."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """Measured numbers of a round that tell the time of others."""

    trainer_batch: float
    """Samples of an inner step of a trainer, as a mean over trainers."""
    fits: float
    """Samples that fit in one pass of a trainer's workers, as a mean over trainers."""
    noise_scale: float | None
    """B of the trainers after the round, in samples; None if it is unknown."""
    step_seconds: float
    """Seconds of an inner step on the slowest rank."""
    sync_seconds: float | None
    """Seconds that the last worker to arrive stopped for syncs, so waiting for others is not in
    them; None if no trainer had two workers."""


class AutoController:
    """Chooses settings every few rounds, from the rounds that it remembers.

    Args:
        limits: Which settings the run chooses, and their bounds.
        norm_test: The batch rule, if it is the norm test.
        fewest_steps: The smallest H that the schedule of syncs allows.
    """

    def __init__(
        self,
        limits: Auto,
        *,
        norm_test: NormTest | None = None,
        fewest_steps: int = 1,
    ) -> None:
        self._limits = limits
        self._auto = limits.chooses
        self._norm_test = norm_test
        self._rounds: list[MeasuredRound] = []
        self._lowest_steps = max(limits.sync_every_minimum, fewest_steps)

    def within_bounds(self, first: Chosen) -> Chosen:
        """The numbers of the first round, with those that the run chooses within their bounds."""
        limits, bounded = self._limits, first
        if "sync_every" in self._auto:
            within = min(max(first.sync_every, self._lowest_steps), limits.sync_every_maximum)
            bounded = replace(bounded, sync_every=within)
        if "eta" in self._auto and first.eta is not None:
            eta = min(max(first.eta, limits.eta_minimum), limits.eta_maximum)
            bounded = replace(bounded, eta=eta)
        if "multiplier" in self._auto:
            multiplier = min(first.multiplier, limits.multiplier_maximum)
            bounded = replace(bounded, multiplier=multiplier)
        return bounded

    def update(
        self, chosen: Chosen, measured: MeasuredRound, rounds_done: int
    ) -> tuple[Change, ...]:
        """Take in a round and, if it is time, choose again.

        Args:
            chosen: The numbers in force in the round.
            measured: The round's numbers.
            rounds_done: Complete rounds of the run, including this one.

        Returns:
            What has changed, with the reason.
        """
        # The first round has what happens once: connections, memory, caches.
        if rounds_done > 1:
            self._rounds = [*self._rounds, measured][-REMEMBERED * self._limits.every :]
        if rounds_done % self._limits.every or not self._rounds:
            return ()
        return tuple(self._choices(chosen))

    def forget(self) -> None:
        """Forget the rounds so far: a merge has changed which workers serve a trainer."""
        self._rounds = []

    def _choices(self, chosen: Chosen) -> list[Change]:
        recent = self._rounds[-self._limits.every :]
        syncs = [row.sync_seconds for row in recent if row.sync_seconds is not None]
        sync_seconds = median(syncs) if syncs else None
        seconds = fit_step_seconds(
            [row.trainer_batch for row in self._rounds], [row.step_seconds for row in self._rounds]
        )
        latest, per_step = recent[-1], (sync_seconds or 0.0) / chosen.sync_every
        found = [
            self._sync_every(
                chosen.sync_every, median(row.step_seconds for row in recent), sync_seconds
            ),
            self._eta(chosen.eta, latest, seconds, per_step),
            self._multiplier(chosen.multiplier, latest, seconds, per_step),
        ]
        return [change for change in found if change and change.before != change.after]

    def _sync_every(
        self, before: int, step_seconds: float, sync_seconds: float | None
    ) -> Change | None:
        if "sync_every" not in self._auto or not sync_seconds:
            return None
        limits = self._limits
        wanted = fastest_sync_every(
            sync_seconds=sync_seconds, step_seconds=step_seconds, cost=limits.sync_cost
        )
        share = sync_seconds / (before * step_seconds + sync_seconds)
        return Change(
            setting="sync_every",
            before=before,
            after=round(paced(before, wanted, self._lowest_steps, limits.sync_every_maximum)),
            reason=f"syncs take {share:.0%} of the time, and {limits.sync_cost:.0%} is best",
        )

    def _eta(
        self,
        before: float | None,
        latest: MeasuredRound,
        seconds: StepSeconds,
        sync_seconds: float,
    ) -> Change | None:
        noise_scale = latest.noise_scale
        if "eta" not in self._auto or not self._norm_test or not before or not noise_scale:
            return None
        batch = fastest_batch(noise_scale=noise_scale, seconds=seconds, sync_seconds=sync_seconds)
        wanted = eta_for(batch, noise_scale, plug_in=self._norm_test.estimator == "plug-in")
        return Change(
            setting="eta",
            before=before,
            after=paced(before, wanted, self._limits.eta_minimum, self._limits.eta_maximum),
            reason=f"{_costs(seconds, sync_seconds)}, so at a noise scale of {noise_scale:.0f} "
            f"samples a batch of {batch:.0f} is best",
        )

    def _multiplier(
        self, before: float, latest: MeasuredRound, seconds: StepSeconds, sync_seconds: float
    ) -> Change | None:
        noise_scale = latest.noise_scale
        if "multiplier" not in self._auto or not noise_scale:
            return None
        wanted = fastest_multiplier(
            noise_scale=noise_scale,
            fits=latest.fits,
            seconds=seconds,
            sync_seconds=sync_seconds,
            maximum=self._limits.multiplier_maximum,
        )
        return Change(
            setting="multiplier",
            before=before,
            after=paced(before, wanted, 1.0, self._limits.multiplier_maximum),
            reason=f"{_costs(seconds, sync_seconds)}, so at a noise scale of {noise_scale:.0f} "
            f"samples it is best to accumulate from {wanted:.3g} times what fits",
        )

    def state_dict(self) -> dict[str, Any]:
        """The remembered rounds; the numbers in force are part of the run's state."""
        return {"rounds": [asdict(row) for row in self._rounds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._rounds = [MeasuredRound(**row) for row in state["rounds"]]


def changed(chosen: Chosen, changes: Iterable[Change]) -> Chosen:
    """The numbers in force with these changes."""
    values: dict[str, Any] = {change.setting: change.after for change in changes}
    return replace(chosen, **values)


def eta_for(batch: float, noise_scale: float, *, plug_in: bool) -> float:
    """The eta with which requests converge to a batch, if the noise scale stays the same.

    Args:
        batch: In samples; may be 0 or infinite.
        noise_scale: B, in samples.
        plug_in: True for the plug-in form of the norm test.
    """
    bias = noise_scale if plug_in else 0.0
    return math.sqrt(noise_scale / (batch + bias)) if batch + bias > 0 else math.inf


def paced(before: float, wanted: float, lowest: float, highest: float) -> float:
    """The new value of a setting: nearer to what is wanted, by no more than `LARGEST_FACTOR`.

    It is the value before if what is wanted, brought within the bounds, differs by `HYSTERESIS` or
    less.
    """
    goal = min(max(wanted, lowest), highest)
    if max(goal / before, before / goal) <= 1 + HYSTERESIS:
        return before
    return min(max(goal, before / LARGEST_FACTOR), before * LARGEST_FACTOR)


def _costs(seconds: StepSeconds, sync_seconds: float) -> str:
    fixed = seconds.per_step + sync_seconds
    return (
        f"a sample takes {seconds.per_sample:.3g} s and a step with its part of a sync {fixed:.3g} "
        "s more"
    )
