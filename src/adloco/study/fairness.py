"""Conditions of a comparison: equal data, validation windows, tokenizer, model, task and budget."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from adloco.config.finding import held_by, setting_facts
from adloco.study.arms import EMPTY, StudyRun

MACHINE = ("device", "cores", "torch_threads")
"""What environment.json has of the machine."""


def differences(runs: Sequence[StudyRun], varied: Sequence[str] = ()) -> list[str]:
    """The settings in which arms differ, with the value of each arm; `-` where it has none, and
    what their measured seconds depend on besides. Left out is what must be equal, which
    `inequalities` names unless it is varied on purpose, and what changes no number.
    """
    facts = setting_facts()
    found = []
    for setting, values in _values(runs):
        traceless = setting in facts and facts[setting].traceless
        unnamed = held_by(setting) and setting not in varied
        if not (unnamed or traceless or setting == "run.seed"):
            found.append(f"{setting} ({_of_arms(values)})")
    machines = [
        (run.arm, {name: str(value) for name, value in run.environment.items() if name in MACHINE})
        for run in runs
        if run.environment
    ]
    return found + [f"{name} ({_of_arms(values)})" for name, values in _unlike(machines)]


def _values(runs: Sequence[StudyRun]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each setting in which runs differ, and its value in each arm."""
    return _unlike((run.arm, run.settings) for run in runs)


def _unlike(
    runs: Iterable[tuple[str, Mapping[str, str]]],
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each name whose value differs between runs (arm, values), and its values in each arm."""
    each = [*runs]
    for setting in dict.fromkeys(name for _, named in each for name in named):
        given: dict[str, set[str]] = {}
        for arm, settings in each:
            given.setdefault(arm, set()).add(settings.get(setting, "-"))
        if len(set().union(*given.values())) > 1:
            yield setting, {arm: " or ".join(sorted(texts)) for arm, texts in given.items()}


def _of_arms(values: Mapping[str, str]) -> str:
    """The value of each arm; an arm whose name has commas is in quotes."""
    named = ((repr(arm) if "," in arm else arm, value) for arm, value in values.items())
    return ", ".join(f"{arm}: {value or EMPTY}" for arm, value in named)


def inequalities(runs: Sequence[StudyRun], varied: Sequence[str] = ()) -> list[str]:
    """Things in which arms differ and should not, with each arm's value; not those in `varied`."""
    return [
        f"{held_by(setting)} ({setting}: {_of_arms(values)})"
        for setting, values in _values(runs)
        if held_by(setting) and setting not in varied
    ]


def unpaired(runs: Sequence[StudyRun]) -> str:
    """A sentence about two arms without a common seed, which have no difference; empty if all pairs
    share one.
    """
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.arm, set()).add(run.seed)
    for pair in itertools.combinations(seeds, 2):
        if seeds[pair[0]].isdisjoint(seeds[pair[1]]):
            texts = (f"{arm} ({', '.join(map(str, sorted(seeds[arm])))})" for arm in pair)
            return (
                f"No seed is shared by {' and '.join(texts)}, so no difference between them is "
                "shown; train all arms with the same run.seed."
            )
    return ""


def held_equal(runs: Sequence[StudyRun]) -> list[str]:
    """Things that all arms have in common, in words."""
    unequal = {held_by(setting) for setting, _ in _values(runs)}
    budget = [
        f"{limit:,} {name.replace('_', ' ')}"
        for name, limit in runs[0].recipe.run.limits.items()
        if limit
    ]
    names = dict.fromkeys(held_by(name) for name in setting_facts())
    equal = [name for name in names if name and name not in unequal and name != "budget"]
    return [*equal, *(budget if "budget" not in unequal else [])]
