"""Settings that change when a run is resumed: those that decide its numbers, so that it gets past
numbers that are not finite, with the record of each change in the run folder; and longer budgets,
with the schedule that follows from them.
"""

import math
from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adloco.config.finding import setting_facts
from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import named_settings, to_toml
from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.errors import require
from adloco.rules.learning_rate import LearningRate
from adloco.run.budget import spent_after
from adloco.run.folder import RECIPE, SUMMARY, run_folder
from adloco.run.json_files import read_objects, text_of
from adloco.run.record_types import Count, Text
from adloco.run.records import Records
from adloco.setting import Facts
from adloco.whole_file import write_text

if TYPE_CHECKING:
    from adloco.run.stored import StoredRun

CHANGES = "changes.jsonl"


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A setting that was changed when the run was resumed."""

    round: Count
    """Complete rounds before it."""
    setting: Text
    before: Text
    after: Text

    @property
    def text(self) -> str:
        """The change in a sentence."""
        return (
            f"{self.setting} was changed from {self.before} to {self.after} after round "
            f"{self.round}"
        )


def changed_settings(
    folder: Path, recipe: Recipe, begun: Mapping[str, str], rounds: int
) -> list[Changed]:
    """The recorded settings that differ from those of the checkpoint to resume from.

    Args:
        recipe: The recipe with the flags of this resume.
        begun, rounds: Settings and complete rounds of the run at the checkpoint.

    Raises:
        ValueError: A setting that may only grow would take back what the run has left out.
    """
    changes = [
        Changed(round=rounds, setting=name, before=begun[name], after=value)
        for name, value in _recorded(recipe).items()
        if begun.get(name, value) != value
    ]
    for change in changes:
        require(
            setting_facts()[change.setting].resume != "grows"
            or _has_all(literal_eval(change.before), literal_eval(change.after)),
            f"{change.setting} may only grow on resume, and the run in {folder} has left out "
            f"{change.before} already, got {change.after}",
        )
    return changes


def skipped_by(changes: Sequence[Changed]) -> int:
    """Samples of each stream that these changes leave out."""
    skips = (change for change in changes if change.setting == "data.skip_samples")
    return sum(int(change.after) - int(change.before) for change in skips)


def keep_settings(stored: "StoredRun") -> None:
    """Write the settings of this resume that may change into the recipe of the run folder, and the
    changes into its record, without those that no checkpoint has.
    """
    folder, recipe = stored.folder, stored.recipe
    begun, rounds = stored.about["recipe"], stored.algorithm["rounds_done"]
    path, recorded = folder / RECIPE, read_changes(folder)
    own = read_values(str(path))
    budget = [f"run.{name}" for name in recipe.run.limits]
    values = named_settings(recipe)
    for name in (*_recorded(recipe), *budget, *SCHEDULE):
        section, _, key = name.partition(".")
        own.setdefault(section, {})[key] = values[name]
    text = to_toml(build_recipe(own))
    if text != path.read_text():
        write_text(path, text)
    kept = [change for change in recorded if change.round <= rounds]
    # A resume from this checkpoint may have been killed before the next one: its values are not
    # those that the checkpoint has.
    while kept and kept[-1].after != begun.get(kept[-1].setting):
        kept.pop()
    _write_changes(folder, recorded, [*kept, *stored.changes])


def cut_changes(folder: Path, rounds: int) -> None:
    """Remove the recorded changes after this many rounds; a resumed run records its own."""
    recorded = read_changes(folder)
    _write_changes(folder, recorded, [change for change in recorded if change.round <= rounds])


def _write_changes(folder: Path, before: Sequence[Changed], changes: Sequence[Changed]) -> None:
    """Write the record of changes if it is another than before; without any, there is none."""
    if not changes:
        (folder / CHANGES).unlink(missing_ok=True)
    elif [*changes] != [*before]:
        write_text(folder / CHANGES, text_of(map(asdict, changes)))


def read_changes(folder: Path) -> list[Changed]:
    """The changes of settings on all resumes of the run, in order; ValueError if a line is
    damaged.
    """
    return read_objects(folder / CHANGES, Changed)


def is_recorded(name: str) -> bool:
    """True if a setting may change on resume although it decides the run's numbers."""
    return setting_facts().get(name, Facts()).resume in ("recorded", "grows")


def _recorded(recipe: Recipe) -> dict[str, str]:
    """The recorded settings that the recipe has, as text."""
    values = named_settings(recipe)
    return {name: str(values[name]) for name in values if is_recorded(name)}


def _has_all(before: Any, after: Any) -> bool:
    """True if a number is at least the one before, or if a list has all of the one before."""
    return bool(before <= after) if isinstance(before, int) else {*before} <= {*after}


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


def own_limits(folder: Path) -> dict[str, int]:
    """The limits of the run in a folder, by name; 0 means no limit."""
    return build_recipe(read_values(str(folder / RECIPE))).run.limits


def check_budgets(folder: Path, before: Mapping[str, int], limits: Mapping[str, int]) -> None:
    """Raise ValueError if a run is given a budget that is less than what it has trained."""
    done = spent_after(Records(folder).newest())
    for name, limit in limits.items():
        require(
            limit in (0, before[name]) or limit >= done[name],
            f"run.{name} must be >= {done[name]:,}, which the run in {folder} has trained already, "
            f"got {limit:,}",
        )


def with_longer_schedule(
    folder: Path, recipe: Recipe, about: Mapping[str, Any], samples: int
) -> tuple[Recipe, dict[str, str]]:
    """The recipe and the settings that the run began with, both with the schedule of a longer run
    if the budget has become longer since the checkpoint.

    Args:
        recipe: The recipe with the flags of this resume.
        about: The run at the checkpoint.
        samples: Samples that it had trained on.

    Raises:
        ValueError: The schedule has fallen and cannot be made longer.
    """
    own = own_limits(folder)
    now, begun = recipe.learning_rate, about["recipe"]
    planned = replace(
        now,
        total_tokens=int(begun.get(SCHEDULE[0], now.total_tokens)),
        warmup_fraction=float(begun.get(SCHEDULE[1], now.warmup_fraction)),
    )
    before = about.get("tokens", own["tokens"])  # A run that has not begun has no checkpoint.

    def schedule(tokens: int) -> LearningRate:
        done = samples * recipe.data.context_tokens
        return planned.lengthened(done, tokens) if tokens > before else planned

    grown = [
        f"run.{name}"
        for name, limit in recipe.run.limits.items()
        if (limit or math.inf) > (own[name] or math.inf) and (name != "tokens" or not limit)
    ]
    ended = now.shape != "constant" and samples * recipe.data.context_tokens >= planned.total_tokens
    require(
        not (grown and ended and recipe.run.tokens <= before),
        f"the run cannot become longer by {', '.join(grown)}: its learning rate fell to the end at "
        f"{planned.total_tokens:,} tokens; begin a run that may become longer with "
        "learning_rate.shape constant, or a larger learning_rate.total_tokens",
    )
    longer = schedule(recipe.run.tokens)
    # The folder may have the schedule of a longer run that was cut off before a checkpoint, or was
    # taken back; the fraction of a run that became longer twice was rounded twice.
    for each in (planned, schedule(own["tokens"])):
        close = math.isclose(now.warmup_fraction, each.warmup_fraction)
        if close and replace(now, warmup_fraction=each.warmup_fraction) == each:
            recipe = replace(recipe, learning_rate=longer)
    values = (longer.total_tokens, longer.warmup_fraction)
    return recipe, {**begun, **dict(zip(SCHEDULE, map(str, values), strict=True))}
