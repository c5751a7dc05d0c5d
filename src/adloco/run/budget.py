"""A run's budget: when it is spent, how much of the next round it allows, and what is unusual about
its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.metrics import Record

if TYPE_CHECKING:
    from adloco.algorithms.run_state import RunState

MANY_PASSES = 4
"""Text that is repeated up to four times is about as good as new text; after that it teaches less
with each pass (arXiv 2305.16264).
"""


@dataclass(frozen=True, kw_only=True)
class RoundSize:
    """Length of a round."""

    steps: int
    """Inner steps."""
    per_step: int
    """Samples of an inner step over all trainers."""
    final: int = 0
    """Samples of the last inner step; 0: as many as of the others."""

    @property
    def samples(self) -> int:
        """Samples of the round."""
        return (self.steps - 1) * self.per_step + (self.final or self.per_step)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on a run. It ends when the first of them is reached; 0 means no limit."""

    limits: Mapping[str, int]
    """The limits above 0, by name: tokens, rounds, inner_steps, syncs."""
    tokens_per_sample: int

    @staticmethod
    def of(recipe: Recipe) -> Budget:
        """The budget that a recipe states."""
        return Budget(
            limits={name: limit for name, limit in recipe.run.limits.items() if limit},
            tokens_per_sample=recipe.data.context_tokens,
        )

    def spent(self, state: RunState) -> bool:
        """True if no inner step is left. Asked between rounds."""
        done = self._done(state, state.samples, 0)
        return any(done[name] >= limit for name, limit in self.limits.items())

    def next_round(
        self, state: RunState, *, per_step: int, fewest: int, sync_every: int
    ) -> RoundSize:
        """The next round: H in force, or less if the budget ends earlier; or the round in progress.

        A budget in tokens ends with the first whole sample that reaches it, see `steps_for`.

        per_step: Samples of an inner step over all trainers, as planned.
        """
        if state.in_round:
            return RoundSize(steps=state.round_steps, per_step=per_step, final=state.final_samples)
        steps, final = sync_every, 0
        if "tokens" in self.limits:
            left = math.ceil(self.limits["tokens"] / self.tokens_per_sample) - state.samples
            to_end = steps_for(left, per_step=per_step, fewest=fewest)
            if to_end <= steps:
                steps, final = to_end, left - (to_end - 1) * per_step
        if "inner_steps" in self.limits:
            allowed = self.limits["inner_steps"] - state.inner_steps
            if allowed < steps:
                steps, final = allowed, 0
        return RoundSize(steps=steps, per_step=per_step, final=final)

    def within_first_round(self, steps: int, every: int) -> str:
        """A notice that the budget leaves a first round fewer steps than `every`, the H in force;
        empty if it does not.
        """
        return (
            f"the budget ends after {steps} inner step{'s' * (steps != 1)}, within the first round "
            f"of method.sync_every = {every}: no step follows a full sync, a batch test or a "
            "merge, so their settings hardly matter; raise the budget (recipe section [run]) or "
            "lower method.sync_every"
            if steps < every
            else ""
        )

    def many_passes(self, num_samples: int) -> str:
        """A notice that the budget repeats the text many times; empty if it does not."""
        in_text = num_samples * self.tokens_per_sample
        passes = self.limits.get("tokens", 0) / in_text
        return (
            f"run.tokens is {passes:.1f} times the text, which has {in_text:,} tokens to train on, "
            f"and text teaches less when it is repeated more than {MANY_PASSES} times; give more "
            "text, or lower run.tokens"
            if passes > MANY_PASSES
            else ""
        )

    def check_lowered(
        self, state: RunState, size: RoundSize, before: Mapping[str, int], folder: Path
    ) -> None:
        """Raise ValueError if another limit than before ends the run within the round in progress,
        which keeps its length; or, between rounds, where the run stands, because it has no final
        evaluation.

        Args:
            size: The next round, or the one in progress.
            before: The limits so far, by name; 0 means no limit.
        """
        done = self._done(state, state.samples, 0)
        end = self._done(state, state.samples + size.samples, size.steps) | {
            "rounds": state.rounds_done + 1,
            "syncs": state.syncs + state.will_sync,
        }
        for name, limit in self.limits.items():
            if limit == before[name]:
                continue
            require(
                not state.in_round or limit >= end[name],
                f"run.{name} must be >= {end[name]:,}, where the round in progress of the run in "
                f"{folder} ends, got {limit:,}",
            )
            require(
                limit > done[name],
                f"run.{name} must be > {done[name]:,}, because the run in {folder} stands there "
                f"without a final evaluation, got {limit:,}",
            )

    def used(self, state: RunState) -> tuple[float, str]:
        """The part of the budget that is used, from 0 to 1, and the nearest limit in words.

        The round in progress counts, see `RunState.samples_so_far`.
        """
        done = self._done(state, state.samples_so_far, state.begun_steps)
        part, name = max((done[name] / limit, name) for name, limit in self.limits.items())
        words = name.replace("_", " ")
        return min(1.0, part), f"{done[name]:,} / {self.limits[name]:,} {words}"

    def _done(self, state: RunState, samples: int, steps: int) -> dict[str, int]:
        return {
            "tokens": samples * self.tokens_per_sample,
            "rounds": state.rounds_done,
            "inner_steps": state.inner_steps + steps,
            "syncs": state.syncs,
        }


def steps_for(samples: int, *, per_step: int, fewest: int) -> int:
    """Inner steps in which these samples are trained on.

    The last takes what is left: fewer samples than the others, or, where fewer than `fewest` would
    be left for it, these as well. So no step takes less than `fewest`, unless all samples are less.
    """
    return max(1, (samples - fewest) // per_step + 1)


def spent_after(record: Record) -> dict[str, int]:
    """Progress of a run after a round, by the names of limits.

    record: The round's line of metrics.jsonl; empty before the first round.
    """
    names = {"tokens": "tokens", "rounds": "round", "inner_steps": "inner_steps", "syncs": "syncs"}
    return {limit: record.get(name, 0) for limit, name in names.items()}


def part_used(limits: Mapping[str, int], record: Record) -> float:
    """The part of a budget that is used after a round, from 0 to 1; a limit of 0 is none."""
    done = spent_after(record)
    return min(1.0, max((done[name] / limit for name, limit in limits.items() if limit), default=0))
