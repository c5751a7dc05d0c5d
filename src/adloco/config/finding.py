"""Finding the setting that somebody means by part of its name, or by a name from elsewhere."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from adloco.config.sections import SECTIONS, Section
from adloco.config.values import takes_truths
from adloco.setting import Facts, facts_of


@functools.cache
def setting_facts() -> Mapping[str, Facts]:
    """The facts of every setting that a recipe can have, by section.key, section by section."""
    found: dict[str, Facts] = {}
    for section, content in SECTIONS.items():
        if choice := content.choice:
            found[f"{section}.{choice.key}"] = Facts(aliases=choice.aliases, code=True)
        for owner in _owners(content):
            for field in fields(owner):
                found.setdefault(f"{section}.{field.name}", facts_of(field))
    return found


def code_named(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The settings with which a recipe names code of the user's own, by section.key.

    values: The recipe's sections, as from `read_values`.
    """
    named = {
        f"{section}.{key}": str(value)
        for section, content in values.items()
        for key, value in content.items()
    }
    own = {name: text for name, text in named.items() if ":" in text}
    return {name: text for name, text in own.items() if setting_facts().get(name, Facts()).code}


def held_by(name: str) -> str:
    """Things that this setting decides and a comparison's runs must share; empty: nothing.

    name: section.key; also one of a class of the user's own.
    """
    own, choice = setting_facts().get(name, Facts()).equal, SECTIONS[name.partition(".")[0]].choice
    return (choice.held_equal if choice else "") if own is None else own


def choices_with(section: str, key: str) -> list[str]:
    """The choices of a section, such as batch rules, that have this setting."""
    choice = SECTIONS[section].choice
    classes = choice.register.classes if choice else {}
    return [word for word, kind in classes.items() if any(key == one.name for one in fields(kind))]


def switches() -> set[str]:
    """section.key of every setting that is true or false."""
    return {
        f"{section}.{field.name}"
        for section, content in SECTIONS.items()
        for owner in _owners(content)
        for field in fields(owner)
        if field.type == "bool" or takes_truths(field.type)
    }


def aliases() -> dict[str, str]:
    """Names that papers and other programs use, and the settings they stand for."""
    return {alias: name for name, facts in setting_facts().items() for alias in facts.aliases}


def settings_meant(word: str) -> list[str]:
    """The settings whose key, or other name, is this word: lr, --sync-every, H or method.h."""
    key = _key(word)
    named = [name for name in setting_facts() if name.partition(".")[2] == key]
    return [*named, *([aliases()[key]] if key in aliases() else [])]


def settings_near(word: str) -> list[str]:
    """The settings that a misspelt word may mean."""
    known = {name.partition(".")[2] for name in setting_facts()} | aliases().keys()
    nearest = difflib.get_close_matches(_key(word), known, n=1)
    return settings_meant(nearest[0]) if nearest else []


def _owners(content: Section) -> list[type]:
    """The classes whose fields can be settings of a section."""
    chosen = content.choice.register.classes.values() if content.choice else ()
    return [*chosen, *content.parts.values()]


def _key(word: str) -> str:
    return word.lstrip("-").replace("-", "_").rpartition(".")[2].lower()
