"""What the runs of a comparison must have in common: data, validation windows, tokenizer, model,
task and budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adloco.config.finding import held_by, setting_names
from adloco.config.recipe_text import named_settings
from adloco.study.arms import StudyRun


@dataclass(frozen=True, kw_only=True)
class Inequality:
    """Something in which the arms of a comparison differ although they should not."""

    what: str
    setting: str
    values: Mapping[str, str]
    """Arm -> value."""

    def __str__(self) -> str:
        values = ", ".join(f"{arm}: {value}" for arm, value in self.values.items())
        return f"{self.what} ({self.setting}: {values})"


def inequalities(runs: Sequence[StudyRun], varied: Sequence[str] = ()) -> list[Inequality]:
    """What differs between arms.

    Args:
        runs: Runs of all arms.
        varied: Settings in which the arms differ on purpose.
    """
    each = [
        (run.arm, {name: str(value) for name, value in named_settings(run.recipe).items()})
        for run in runs
    ]
    found = []
    for setting in dict.fromkeys(name for _, named in each for name in named if held_by(name)):
        given: dict[str, set[str]] = {}
        for arm, settings in each:
            given.setdefault(arm, set()).add(settings.get(setting, "-"))
        values = {arm: " or ".join(sorted(texts)) for arm, texts in given.items()}
        if len(set().union(*given.values())) > 1 and setting not in varied:
            found.append(Inequality(what=held_by(setting), setting=setting, values=values))
    return found


def held_equal(runs: Sequence[StudyRun]) -> list[str]:
    """What all arms have in common, in words."""
    unequal = {found.what for found in inequalities(runs)}
    budget = {
        f"{limit:,} {name.replace('_', ' ')}"
        for name, limit in runs[0].recipe.run.limits.items()
        if limit
    }
    names = dict.fromkeys(held_by(name) for name in setting_names())
    equal = [name for name in names if name and name not in unequal and name != "budget"]
    return [*equal, *(sorted(budget) if "budget" not in unequal else [])]
