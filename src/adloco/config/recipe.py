"""Reading recipes from TOML files and from command-line flags.

A recipe is a set of settings in sections; `adloco.config.sections` lists all of them.
"""

import difflib
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from adloco.config.finding import choices_with, settings_meant
from adloco.config.sections import SECTIONS, Recipe
from adloco.config.shipped import shipped_recipes, shipped_text
from adloco.config.values import FlagText, check_size, construct, plain_value
from adloco.errors import SettingError, one_of, require
from adloco.options import options

Values = dict[str, dict[str, Any]]
"""Section -> key -> value, as in a TOML file."""


def read_values(recipe: str) -> Values:
    """Read the sections of a recipe; without run.name, the recipe gets the name of its file.

    recipe: Path of a TOML file, or the name of a shipped recipe.

    Raises:
        ValueError: There is no such recipe, or it is not valid TOML in UTF-8.
    """
    path, shipped = Path(recipe), shipped_recipes()
    if recipe in shipped:
        text = shipped_text(recipe)
    else:
        require(
            not (path / "recipe.toml").is_file(),
            f"{recipe!r} is the folder of a run and not a recipe; resume it with adloco train "
            f"--resume {shlex.quote(recipe)}, or give its settings, {path / 'recipe.toml'}",
        )
        require(
            path.is_file(),
            f"recipe {recipe!r} is neither a file nor a shipped recipe; shipped are "
            f"{', '.join(shipped)}{_suggest(recipe, shipped)}",
        )
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"recipe {recipe!r} is not UTF-8 text; save it as UTF-8") from error
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Also of numbers with too many digits.
        raise ValueError(
            f"recipe {recipe!r} is not valid TOML: {str(error).rstrip('.')}; correct it"
        ) from error
    for section, content in values.items():
        require(
            isinstance(content, dict),
            f"recipe key {section!r} stands outside a section; put it under one of "
            f"{', '.join(SECTIONS)}",
        )
    named = {"name": Path(recipe).stem} | values.get("run", {})
    return values | {"run": named}


def override(
    values: Values, flags: Sequence[tuple[str, Any]], kept: Collection[str] = ()
) -> Values:
    """Replace values of a recipe by those of command-line flags, or by values from Python.

    Args:
        values: The recipe's sections, as from `read_values`.
        flags: (section.key, value) of each flag, in order; of equal names the last one counts. A
            text is read as on the command line.
        kept: Names of values that were given by hand, too: they stay where a flag replaces their
            class by one that knows them.
    """
    result = {section: dict(content) for section, content in values.items()}
    given: Values = {}
    for name, value in flags:
        section, _, key = name.partition(".")
        require(
            bool(key), f"--{name} must name a section and a key, for instance --run.tokens 1000000"
        )
        given.setdefault(section, {})[key] = FlagText(value) if isinstance(value, str) else value
    for section, content in given.items():
        stays = {name.partition(".")[2] for name in kept if name.startswith(f"{section}.")}
        old = _known_to_choice(section, result.get(section, {}), content, stays)
        result[section] = old | content
    return result


def _known_to_choice(
    section: str, values: Mapping[str, Any], flags: Mapping[str, Any], stays: Collection[str]
) -> dict[str, Any]:
    """Leave out the recipe's settings of a class that a flag replaces by another one, but for those
    that stay and that this one knows.

    With --inner.optimizer sgd in a recipe of AdamW, those of AdamW would be errors, or, as its
    learning rate, the wrong values. Misspelt ones still are errors.
    """
    choice = SECTIONS[section].choice if section in SECTIONS else None
    if choice is None or choice.key not in flags:
        return dict(values)
    chosen, replaced = (_classes(section, each)[choice.part] for each in (flags, values))
    own = {field.name for field in fields(replaced)} if chosen is not replaced else set()
    own -= {field.name for field in fields(chosen)} & {*stays}
    return {key: value for key, value in values.items() if key not in own}


def build_recipe(values: Values) -> Recipe:
    """Build a recipe from its sections and check every value; ValueError names the first setting
    or section that is unknown, missing, of the wrong type or out of range.
    """
    for section in values:
        if section not in SECTIONS:
            settings = [(section, key) for key in values[section]]
            raise ValueError(
                f"there is no recipe section [{section}]"
                f"{_suggest(section, list(SECTIONS), settings)}; sections are {', '.join(SECTIONS)}"
            )
    built: dict[str, Any] = {}
    for name in SECTIONS:
        built |= _build_section(name, values.get(name, {}))
    built["options"] = {key: built.pop(key) for key in options()}
    return Recipe(**built)


def _build_section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    classes = _classes(name, values)
    choice = SECTIONS[name].choice
    known = [field.name for owner in classes.values() for field in fields(owner)]
    known += [choice.key] if choice else []
    for key in values:
        if key not in known:
            chosen = values.get(choice.key, choice.default) if choice else None
            where = f" with {choice.key} = {chosen!r}" if choice else ""
            allowed = sorted(known)
            others = choices_with(name, key)
            advice = (
                f"; it is one with {choice.key} = {one_of(map(repr, others))}"
                if choice and others
                else f"{_suggest(key, allowed, [(name, key)])}; settings are {', '.join(allowed)}"
            )
            raise ValueError(f"{name}.{key} is not a setting of [{name}]{where}{advice}")
    return {part: _construct(name, owner, values) for part, owner in classes.items()}


def _construct(section: str, owner: type, values: Mapping[str, Any]) -> Any:
    """An object of the class, with those of the section's values that are the class's own."""
    hints, own = get_type_hints(owner, include_extras=True), fields(owner)
    given = {
        field.name: plain_value(f"{section}.{field.name}", hints[field.name], values[field.name])
        for field in own
        if field.name in values
    }
    try:
        for field in own:
            if field.name in given and given[field.name] != field.default:
                check_size(f"{section}.{field.name}", given[field.name])
        return construct(owner, given)
    except ValueError as error:
        text = error.named(section) if isinstance(error, SettingError) else str(error)
        # Errors of a class of the user's own begin with the bare name of the setting.
        bare = text.partition(" ")[0] in {field.name for field in own}
        text = f"{section}.{text}" if bare else text
        raise ValueError(f"{text} (recipe section [{section}])") from error


def _classes(name: str, values: Mapping[str, Any]) -> dict[str, type]:
    section = SECTIONS[name]
    if section.choice is None:
        return dict(section.parts)
    choice = section.choice
    chosen = values.get(choice.key, choice.default)
    try:
        owner = choice.register.find(str(chosen))
    except ValueError as error:
        raise ValueError(f"{name}.{choice.key} {error}") from error
    taken = {field.name for part in section.parts.values() for field in fields(part)} | {choice.key}
    twice = sorted(taken & {field.name for field in fields(owner)})
    require(
        not twice,
        f"{name}.{choice.key} {str(chosen)!r} has a setting {', '.join(twice)}, which [{name}] has "
        "already; rename it",
    )
    return {choice.part: owner, **section.parts}


def _suggest(word: str, allowed: Sequence[str], settings: Sequence[tuple[str, str]] = ()) -> str:
    """A hint at the word that was meant, or at settings of that (section, key)."""
    known = ((f"{section}.{key}", settings_meant(key)) for section, key in settings)
    meant = [name for own, names in known if own not in names for name in names]
    meant = meant or [repr(name) for name in difflib.get_close_matches(word.lower(), allowed, n=1)]
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""
