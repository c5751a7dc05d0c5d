"""The arms of a study: recipes with changes of their own, or finished runs, over several seeds."""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adloco.config.finding import setting_facts
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.config.setting_words import check_text_named, take_settings
from adloco.config.shipped import shipped_recipes
from adloco.errors import require
from adloco.run.budget import Budget, steps_for
from adloco.run.changes import read_changes
from adloco.run.folder import ENVIRONMENT, RECIPE, SUMMARY, finished
from adloco.run.json_files import read_json
from adloco.setting import Facts

Flags = tuple[tuple[str, str], ...]
"""(section.key, value) of settings, in order."""
EMPTY = "''"
"""An empty setting in a sentence."""
NAMED_CHANGES = 3
"""Settings that the name of an arm has at most."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study."""

    arm: str
    seed: int
    recipe: Recipe
    folder: Path
    given: bool = False
    """True if the run was given by its folder, and not planned."""

    @property
    def finished(self) -> bool:
        """True if the run has ended and was summed up."""
        return (self.folder / SUMMARY).is_file()

    @property
    def too_short(self) -> str:
        """A notice that the budget ends before anything but inner steps has happened; empty if it
        does not, or if only a run can tell.
        """
        recipe, method = self.recipe, self.recipe.method
        acts = recipe.syncs or recipe.batch_cap is not None
        if not acts or recipe.switch.max_micro_batch == "auto":
            return ""
        used = recipe.switch.clipped(recipe.first_batch, method.workers_per_trainer)
        samples = math.ceil(recipe.run.tokens / recipe.data.context_tokens)
        in_tokens = steps_for(
            samples,
            per_step=used * method.num_trainers,
            fewest=recipe.batch.fewest_groups * method.num_workers,
        )
        limits = in_tokens if samples else 0, recipe.run.inner_steps
        steps = min(filter(None, limits), default=method.sync_every)
        return Budget.of(recipe).within_first_round(steps, method.sync_every)

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and the versions with which it began; empty if it has not."""
        file = self.folder / ENVIRONMENT
        return read_json(file) if file.is_file() else {}

    @property
    def settings(self) -> dict[str, str]:
        """All settings as text; 0 for a schedule that ends with the budget, as in recipes, and the
        type that `run.precision` auto took, once the run has begun.
        """
        named = {name: str(value) for name, value in named_settings(self.recipe).items()}
        if named["learning_rate.total_tokens"] == named["run.tokens"]:
            named["learning_rate.total_tokens"] = "0"
        if named["run.precision"] == "auto":
            named["run.precision"] = self.environment.get("precision", "auto")
        return named

    @property
    def notices(self) -> list[str]:
        """The run's sentences before its first round about settings that are unusual together."""
        return list(self.environment.get("notices", ()))

    @property
    def changes(self) -> list[str]:
        """How resumes changed its settings, and the budget that was planned, in sentences."""
        said = [change.text for change in read_changes(self.folder)]
        file = self.folder / RECIPE
        own = read_values(str(file))["run"] if file.is_file() else {}
        for name, planned in self.recipe.run.limits.items():
            if own.get(name, planned) != planned:
                said.append(f"run.{name} is {own[name]:,} and not {planned:,}")
        return said


def parse_arm(text: str) -> tuple[str, str, Flags]:
    """The name, recipe and settings of an arm, from [NAME=]RECIPE[@"--section.key VALUE ..."].

    Raises:
        ValueError: The words behind the @ are not settings, or one has no value.
    """
    head, _, tail = text.partition("@")
    name, _, recipe = head.rpartition("=")
    try:
        words = shlex.split(tail)
    except ValueError as error:
        raise ValueError(f"{text!r} has an open quote behind the @; close it") from error
    settings, others = take_settings(words)
    require(
        not others,
        f'{text!r} must be RECIPE@"--section.key VALUE ...", got {tail!r} behind the @',
    )
    changes = ", ".join(f"{key} {value}" for key, value in settings)
    stem = Path(recipe).stem
    return name or (f"{stem}, {changes}" if changes else stem), recipe, tuple(settings)


def plan_runs(
    whats: Sequence[str], common: Sequence[tuple[str, str]], num_seeds: int, folder: Path
) -> list[StudyRun]:
    """The runs of a study, arm by arm.

    Args:
        whats: Recipes, as `parse_arm` takes them, or folders of finished runs.
        common: Settings of all arms; an arm's own are stronger.
        num_seeds: Runs of each recipe, at least 1: run.seed, run.seed + 1, ...
        folder: The study's folder, in which new runs are trained.

    Raises:
        ValueError: An arm is no recipe and no finished run, stands twice, or has bad settings.
    """
    runs: list[StudyRun] = []
    for what in whats:
        if Path(what).is_dir() and what not in shipped_recipes():
            runs.append(finished_run(Path(what)))
            continue
        name, recipe, changes = parse_arm(what)
        require(
            recipe in shipped_recipes() or not Path(recipe).is_dir(),
            f"{recipe!r} is a folder; give the folder of a run alone, without NAME= or settings",
        )
        is_file = Path(recipe).is_file() or Path(recipe).suffix == ".toml"
        require(
            is_file or Path(recipe).name == recipe,
            f"{recipe!r} is neither a run folder nor a recipe; adloco runs lists the runs in runs/ "
            "or in a folder that you name, and adloco recipes the recipes",
        )
        require(
            all(run.arm != name or run.given for run in runs),
            f"arm {name!r} stands twice; leave one out, or name one as in NAME={what}",
        )
        runs += [
            planned_run(name, recipe, common, changes, seed, folder) for seed in range(num_seeds)
        ]
    runs = _arms_of_folders(runs)
    for run in runs:
        same = [other for other in runs if (other.arm, other.seed) == (run.arm, run.seed)]
        require(
            len(same) == 1,
            f"arm {run.arm!r} has {len(same)} runs with seed {run.seed}; leave all but one out",
        )
    return runs


def planned_run(
    arm: str,
    recipe: str,
    common: Sequence[tuple[str, str]],
    changes: Sequence[tuple[str, str]],
    seed: int,
    folder: Path,
) -> StudyRun:
    """A run of a recipe with these settings. Its folder's name follows from its settings, so the
    same run is found again, and never taken for another.

    Args:
        recipe: A file, or the name of a shipped recipe.
        common: Settings of all arms.
        changes: The arm's own settings, which are stronger. If they choose another class, for
            instance another batch.rule, the common settings that it lacks are left out.
        seed: Number that is added to run.seed.
    """
    everywhere = [name for name, _ in common]
    check_text_named([*common, *changes])
    values = override(override(read_values(recipe), common), changes, everywhere)
    first = build_recipe(values)
    first.schedule_tokens()  # What cannot be trained is refused before anything is.
    seed += first.run.seed
    built = replace(first, run=replace(first.run, seed=seed, trackers="none"))
    planned = StudyRun(arm=arm, seed=seed, recipe=built, folder=folder)
    identity = json.dumps([arm, _identity(planned)], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    slug = re.sub(r"[^\w.]+", "-", arm).strip("-")[:48]
    return replace(planned, folder=folder / "runs" / f"{slug}-seed-{seed}-{digest}")


def finished_run(folder: Path) -> StudyRun:
    """A run that has ended, by its folder; ValueError if none lives there, or it has not ended."""
    require(
        (folder / RECIPE).is_file(),
        f"{str(folder)!r} is neither a recipe nor a run folder (no {RECIPE} in it)",
    )
    from adloco.run.stored import check_code  # It imports torch.

    check_code(finished(folder))  # To build the recipe imports it.
    recipe = build_recipe(read_values(str(folder / RECIPE)))
    return StudyRun(
        arm=recipe.run.name, seed=recipe.run.seed, recipe=recipe, folder=folder, given=True
    )


def _identity(run: StudyRun) -> dict[str, str]:
    """All settings on which a run's records depend."""
    named, known = run.settings.items(), setting_facts()
    return {key: value for key, value in named if not known.get(key, Facts()).traceless}


def _arms_of_folders(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Put runs that were given by folders and differ in their seed alone into one arm. An arm whose
    name is taken is named by the settings in which it differs from the arm that has it. Recipes
    keep their names, wherever they stand.
    """
    arms: dict[str, str] = {}
    first = {run.arm: run.settings for run in runs if not run.given}
    recipes = [*first]
    result = []
    for run in runs:
        if not run.given:
            result.append(run)
            continue
        settings = _identity(run)
        del settings["run.seed"]
        key = json.dumps(settings, sort_keys=True)
        if key not in arms:
            taken = {*arms.values(), *recipes}
            known = first.setdefault(run.arm, settings)
            # A recipe's run that has not begun does not know yet what auto is.
            other = [
                name for name, value in settings.items() if known.get(name) not in (value, "auto")
            ]
            named = (f"{name} {settings[name] or EMPTY}" for name in other[:NAMED_CHANGES])
            changes = ", ".join(named)
            name = f"{run.arm}, {changes}" if changes and run.arm in taken else run.arm
            names = (name if number == 1 else f"{name} {number}" for number in range(1, 999))
            arms[key] = next(name for name in names if name not in taken)
        result.append(replace(run, arm=arms[key]))
    return result
