"""Reads a run folder back: its recipe, its newest checkpoint and its tokenizer; and checks that
they belong together.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, named_in_section, override, read_values
from adloco.config.recipe_text import named_settings, to_toml
from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.data.tokenizers import Tokenizer, load_tokenizer
from adloco.errors import require
from adloco.rules.learning_rate import LearningRate
from adloco.run import checkpoint
from adloco.tasks.task import Task

CHECKPOINTS, MODEL, RECIPE, TOKENIZER = "checkpoints", "model", "recipe.toml", "tokenizer"
SUMMARY = "summary.json"
FREE_SETTINGS = {
    # A run may become longer if its schedule allows it.
    "run.tokens",
    "run.rounds",
    "run.inner_steps",
    "run.syncs",
    "run.folder",
    "run.name",
    "run.device",
    "run.threads",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.trackers",
    # Where workers live does not change what they compute.
    "placement.shard_size",
    "placement.replica_size",
    "data.path",
    "data.dataset",
    "data.factory",
    "data.arguments",
    "data.cache",  # The text behind these five is compared by its fingerprint.
    "outer.on_host",
    "evaluation.every",
    "evaluation.windows",
    "profile.memory",
    "switch.pass_limit",
    "memory.gib",
    "memory.fraction",
}
"""Settings that may change on resume; all others decide the run's numbers."""


OWN_SETTINGS = {
    "run.folder",
    "run.name",
    "run.device",
    "run.threads",
    "run.trackers",
    "data.path",
    "data.dataset",
    "data.factory",
    "data.arguments",
    "data.cache",
    "profile.memory",
}
"""Settings that may differ between the ranks of one run; the kind of device and the text behind the
paths are compared instead.
"""
SCHEDULE = ("learning_rate.total_tokens", "learning_rate.warmup_fraction")
"""Settings that follow from the budget when a run becomes longer."""
CHANGEABLE = sorted(FREE_SETTINGS - {"run.folder", "run.name"})


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run folder that was read back."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    checkpoint: Path
    about: dict[str, Any]
    """State of the run at the checkpoint: random generators, seconds, fingerprint of the text,
    settings.
    """
    algorithm: dict[str, Any]
    """`AdLoCo.state_dict()` at the checkpoint."""


def run_folder(folder: Path) -> Path:
    """The same folder; ValueError if it is not a run's."""
    require(
        (folder / RECIPE).is_file(),
        f"{str(folder)!r} is not a run folder (no {RECIPE} in it); give one that `adloco train` "
        "wrote",
    )
    return folder


def read_run(folder: Path, flags: Sequence[tuple[str, str]] = ()) -> StoredRun:
    """Read the run in a folder at its newest checkpoint.

    Args:
        folder: The run's folder.
        flags: (section.key, value) of settings that change on resume; see `CHANGEABLE`.

    Raises:
        ValueError: A part is missing or damaged, comes from another program or version, or was
            changed since the run began.
    """
    recipe = resumed_recipe(folder, flags)
    newest = checkpoint.newest(folder / CHECKPOINTS)
    state = checkpoint.load(newest)
    known = isinstance(state, dict) and {"run", "algorithm"} <= state.keys()
    require(
        known,
        f"checkpoint {newest} was not written by a run; name a run folder that `adloco train` "
        "wrote",
    )
    own_tokens = build_recipe(read_values(str(folder / RECIPE))).run.tokens
    samples = state["algorithm"]["samples"]
    recipe, begun = _lengthened(recipe, state["run"], samples, own_tokens)
    fixed = fixed_settings(recipe)
    changed = [key for key, value in fixed.items() if begun.get(key, value) != value]
    require(
        not changed,
        f"{', '.join(changed)} in {folder / RECIPE} is not what the run began with; restore it, or "
        "start another run",
    )
    # Another choice, for instance another batch.rule, has other settings; it is refused above.
    unknown = [key for key in fixed if key not in begun]
    require(
        not unknown,
        f"the run in {folder} began with a version of adloco without {', '.join(unknown)}; resume "
        "it with that version, or start another run",
    )
    return StoredRun(
        folder=folder,
        recipe=recipe,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        checkpoint=newest,
        about=state["run"],
        algorithm=state["algorithm"],
    )


def resumed_recipe(folder: Path, flags: Sequence[tuple[str, str]]) -> Recipe:
    """The recipe in a run folder, with these settings changed for its resume.

    Args:
        folder: The run's folder.
        flags: (section.key, value) of settings to change.

    Raises:
        ValueError: One of them may not change, or the recipe does not fit this version.
    """
    for name, _ in flags:
        require(
            name in CHANGEABLE,
            f"--{name} cannot change when a run is resumed; leave it out (settings that can: "
            f"{', '.join(CHANGEABLE)})",
        )
    path = run_folder(folder) / RECIPE
    values = read_values(str(path))
    try:
        build_recipe(values)
    except ValueError as error:
        advice = "restore it, resume with the version that began the run, or start another run"
        message = f"{path} does not fit this version of adloco: {error}; {advice}"
        raise ValueError(message) from error
    return build_recipe(override(values, flags))


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
            own = build_recipe(read_values(str(run_folder(folder) / RECIPE))).run
            limit = own.limits[budgets[name]]
            require(
                limit > 0 and (folder / SUMMARY).is_file(),
                f"--{name} {text} is for a run that has spent its {name}; give a number here",
            )
            text = str(math.ceil(Fraction(factor) * limit))
        result.append((name, text))
    return result


def _lengthened(
    recipe: Recipe, about: Mapping[str, Any], samples: int, folder_tokens: int
) -> tuple[Recipe, dict[str, str]]:
    """The recipe and the settings that the run began with, both with the schedule of a longer run
    if the budget has become longer since the checkpoint.

    Args:
        recipe: The recipe with the flags of this resume.
        about: The run at the checkpoint.
        samples: Samples that it had trained on.
        folder_tokens: `run.tokens` in the run's folder.
    """
    now, begun = recipe.learning_rate, about["recipe"]
    planned = replace(
        now,
        total_tokens=int(begun.get(SCHEDULE[0], now.total_tokens)),
        warmup_fraction=float(begun.get(SCHEDULE[1], now.warmup_fraction)),
    )
    before = about.get("tokens", folder_tokens)

    def schedule(tokens: int) -> LearningRate:
        done = samples * recipe.data.context_tokens
        return planned.lengthened(done, tokens) if tokens > before else planned

    with named_in_section("learning_rate", now):
        longer = schedule(recipe.run.tokens)
        # The folder may have the schedule of a longer run that was cut off before a checkpoint.
        if now in (planned, schedule(folder_tokens)):
            recipe = replace(recipe, learning_rate=longer)
    values = (longer.total_tokens, longer.warmup_fraction)
    known = {
        name: str(value) for name, value in zip(SCHEDULE, values, strict=True) if name in begun
    }
    return recipe, {**begun, **known}


def keep_budget(stored: StoredRun) -> None:
    """Write a budget that has changed, and its schedule, into the recipe of the run folder."""
    path = stored.folder / RECIPE
    recipe, now = build_recipe(read_values(str(path))), stored.recipe
    budget = replace(
        recipe.run,
        tokens=now.run.tokens,
        rounds=now.run.rounds,
        inner_steps=now.run.inner_steps,
        syncs=now.run.syncs,
    )
    changed = replace(recipe, run=budget, learning_rate=now.learning_rate)
    if changed != recipe:
        temporary = path.with_name(f".{RECIPE}")
        temporary.write_text(to_toml(changed))
        temporary.replace(path)


def fixed_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must not change on resume, by section.key."""
    return _named(recipe, without=FREE_SETTINGS)


def shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be equal on all ranks, by section.key."""
    return _named(recipe, without=OWN_SETTINGS)


def _named(recipe: Recipe, without: Collection[str]) -> dict[str, str]:
    return {key: str(value) for key, value in named_settings(recipe).items() if key not in without}


def check_corpus(stored: StoredRun, task: Task) -> None:
    """Raise ValueError if the task's text is not the text that the run began with."""
    data = stored.recipe.data
    where = data.source if not data.path else f"the text of {data.source}"
    require(
        task.matches_fingerprint(stored.about["corpus"]),
        f"{where} is not what the run in {stored.folder} began with; restore it, or start another "
        "run",
    )
