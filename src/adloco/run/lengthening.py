"""Runs that become longer on resume: their budget in flags, their schedule, and their recipe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, read_values
from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.errors import require
from adloco.rules.learning_rate import LearningRate
from adloco.run.budget import spent_after
from adloco.run.folder import RECIPE, SUMMARY, run_folder
from adloco.run.records import Records

SCHEDULE = ("learning_rate.total_tokens", "learning_rate.warmup_fraction")
"""Settings that follow from the budget when a run becomes longer."""


def absolute_budgets(folder: Path, flags: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The flags, with a budget such as 2x replaced by a number: that many times the run's own."""
    budgets = {f"run.{name}": name for name in RunSettings().limits}
    result = []
    for name, text in flags:
        factor = text.removesuffix("x")
        if name in budgets and factor != text:
            require(
                factor.replace(".", "", 1).isdecimal() and float(factor) > 0,
                f"--{name} must be a number, or a multiple such as 2x, got {text!r}",
            )
            # Not built: that imports the code that a recipe names, which may be somebody else's.
            limit: Any = read_values(str(run_folder(folder) / RECIPE))["run"].get(budgets[name])
            require(
                isinstance(limit, int) and limit > 0 and (folder / SUMMARY).is_file(),
                f"--{name} {text} is for a run that has spent that budget; give a number here",
            )
            text = str(math.ceil(Fraction(factor) * limit))
        result.append((name, text))
    return result


def check_budgets(folder: Path, recipe: Recipe) -> None:
    """Raise ValueError if a run is given a budget that is less than what it has trained."""
    own = build_recipe(read_values(str(folder / RECIPE))).run.limits
    done = spent_after(Records(folder).newest())
    for name, limit in recipe.run.limits.items():
        require(
            limit in (0, own[name]) or limit >= done[name],
            f"run.{name} must be >= {done[name]:,}, which the run in {folder} has trained already, "
            f"got {limit:,}",
        )


def with_longer_schedule(
    folder: Path, recipe: Recipe, about: Mapping[str, Any], samples: int
) -> tuple[Recipe, dict[str, str]]:
    """The recipe and the settings that the run began with, both with the schedule of a longer run
    if the budget has become longer since the checkpoint.

    Args:
        folder: The run's folder.
        recipe: Its recipe with the flags of this resume.
        about: The run at the checkpoint.
        samples: Samples that it had trained on.

    Raises:
        ValueError: The schedule has fallen and cannot be made longer.
    """
    folder_tokens = build_recipe(read_values(str(folder / RECIPE))).run.tokens
    now, begun = recipe.learning_rate, about["recipe"]
    planned = replace(
        now,
        total_tokens=int(begun.get(SCHEDULE[0], now.total_tokens)),
        warmup_fraction=float(begun.get(SCHEDULE[1], now.warmup_fraction)),
    )
    before = about.get("tokens", folder_tokens)  # A run that has not begun has no checkpoint.

    def schedule(tokens: int) -> LearningRate:
        done = samples * recipe.data.context_tokens
        return planned.lengthened(done, tokens) if tokens > before else planned

    longer = schedule(recipe.run.tokens)
    # The folder may have the schedule of a longer run that was cut off before a checkpoint.
    if now in (planned, schedule(folder_tokens)):
        recipe = replace(recipe, learning_rate=longer)
    values = (longer.total_tokens, longer.warmup_fraction)
    known = {
        name: str(value) for name, value in zip(SCHEDULE, values, strict=True) if name in begun
    }
    return recipe, {**begun, **known}
