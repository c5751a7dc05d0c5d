"""Finds the run that `--restart` resumes, if one of the same recipe has begun in its folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.rules.learning_rate import LearningRate
from adloco.run.folder import RECIPE, not_begun
from adloco.run.stored import changeable, deciding_settings, resumed_recipe


def begun_run(recipe: Recipe, *, trust_recipe: bool = False) -> Path | None:
    """`run.folder`, if a run of this recipe has begun there; None if none has.

    Raises:
        ValueError: `run.folder` is not set, or has a run of another recipe.
    """
    folder = Path(recipe.run.folder)
    require(
        bool(recipe.run.folder),
        "--restart begins a run or resumes it, and needs its folder: give --run.folder too",
    )
    if not_begun(folder) or not (folder / RECIPE).is_file():
        return None
    own = resumed_recipe(folder, (), trust_recipe=trust_recipe)
    there, rate = deciding_settings(own), _of_budget(recipe.learning_rate, own.learning_rate)
    # A run keeps what "auto" has found, and what was changed on a resume.
    differing = [
        f"{name} ({there.get(name)} there, {value} here)"
        for name, value in deciding_settings(replace(recipe, learning_rate=rate)).items()
        if there.get(name) != value and value != "auto" and name not in changeable()
    ]
    require(
        not differing,
        f"run folder {str(folder)!r} has a run of another recipe, by {', '.join(differing)}; "
        "restart that recipe, or use another --run.folder",
    )
    return folder


def kept_values(recipe: Recipe, file: Mapping[str, Mapping[str, Any]], own: Recipe) -> str:
    """A sentence that names the values of a recipe's file that a restarted run does not take over;
    empty if there are none.

    Args:
        recipe: The recipe with the settings of the line.
        file: The values of its file, by section and key.
        own: The recipe with which the run resumes.
    """
    given, values = named_settings(recipe), named_settings(own)
    named = {f"{section}.{key}" for section, keys in file.items() for key in keys}
    kept = [
        f"{name} {values[name]} ({given[name]} in the recipe)"
        for name in sorted(named & {*changeable()})
        if values.get(name) != given[name]
    ]
    return (
        f"the run keeps {', '.join(kept)}, because --restart changes only what is on the line; "
        "give there what is to change"
        if kept
        else ""
    )


def _of_budget(rate: LearningRate, own: LearningRate) -> LearningRate:
    """The schedule of a recipe, with what follows from the budget as a run in its folder has it:
    the end, unless the recipe names it, and the smaller part that is the warm-up of a wsd schedule
    that became longer (`LearningRate.lengthened`).
    """
    if rate.total_tokens:
        return rate
    warmup = rate.warmup_fraction
    if rate.shape == "wsd":
        warmup = min(warmup, own.warmup_fraction)
    return replace(rate, total_tokens=own.total_tokens, warmup_fraction=warmup)
