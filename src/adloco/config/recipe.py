"""Reading recipes from TOML files and from command-line flags.

A recipe is a set of settings in sections; `adloco.config.sections` lists all of them.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pydantic

from adloco.config.finding import settings_meant
from adloco.config.sections import SECTIONS, Recipe
from adloco.config.shipped import shipped_recipes, shipped_text
from adloco.config.sizes import read_gib, read_number
from adloco.errors import require
from adloco.options import options

Values = dict[str, dict[str, Any]]
"""Section -> key -> value, as in a TOML file."""
SMALLEST, LARGEST = 1e-38, 1e38
"""Sizes of numbers other than 0, about those of float32: their squares fit in float64."""
LONGEST_SHOWN = 200
"""Characters of a value in a message."""


def read_values(recipe: str) -> Values:
    """Read the sections of a recipe; without run.name, the recipe gets the name of its file.

    Args:
        recipe: Path of a TOML file, or the name of a shipped recipe.

    Raises:
        ValueError: There is no such recipe, or it is not valid TOML in UTF-8.
    """
    if recipe in shipped_recipes():
        text = shipped_text(recipe)
    else:
        path = Path(recipe)
        names = ", ".join(shipped_recipes())
        require(
            path.is_file(),
            f"recipe {recipe!r} is neither a file nor a shipped recipe; shipped are "
            f"{names}{_suggest(recipe, shipped_recipes())}",
        )
        try:
            text = path.read_bytes().decode("utf-8")
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


def override(values: Values, flags: Sequence[tuple[str, Any]]) -> Values:
    """Replace values of a recipe by those of command-line flags, or by values from Python.

    Args:
        values: The recipe's sections, as from `read_values`.
        flags: (section.key, value) of each flag, in order; of equal names the last one counts. A
            text is read as on the command line.
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
        result[section] = _known_to_choice(section, result.get(section, {}), content) | content
    return result


def _known_to_choice(
    section: str, values: Mapping[str, Any], flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave out the recipe's settings that the class chosen by a flag does not have.

    A flag such as --inner.optimizer sgd can choose another class than the recipe does; settings
    that only the recipe's own choice has would then be errors. Misspelt ones still are.
    """
    choice = SECTIONS[section].choice if section in SECTIONS else None
    if choice is None or choice.key not in flags:
        return dict(values)
    known, replaced = (
        {field.name for owner in _classes(section, chosen).values() for field in fields(owner)}
        for chosen in (flags, values)
    )
    return {key: value for key, value in values.items() if key in known or key not in replaced}


def build_recipe(values: Values) -> Recipe:
    """Build a recipe from its sections and check every value.

    Raises:
        ValueError: A section or setting is unknown, missing, of the wrong type or out of range. The
            message names the first such setting.
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
        built.update(_build_section(name, values.get(name, {})))
    built["options"] = {key: built.pop(key) for key in options()}
    return Recipe(**built)


def _build_section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    classes = _classes(name, values)
    known = [field.name for owner in classes.values() for field in fields(owner)]
    choice = SECTIONS[name].choice
    for key in values:
        if key not in known and not (choice and key == choice.key):
            chosen = values.get(choice.key, choice.default) if choice else None
            where = f" with {choice.key} = {chosen!r}" if choice else ""
            allowed = sorted([*known, *([choice.key] if choice else [])])
            raise ValueError(
                f"{name}.{key} is not a setting of [{name}]{where}"
                f"{_suggest(key, allowed, [(name, key)])}; settings are {', '.join(allowed)}"
            )
    return {part: _construct(name, owner, values) for part, owner in classes.items()}


def _construct(section: str, owner: type, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(owner)
    missing = [
        field.name for field in fields(owner) if field.name not in values and _required(field)
    ]
    require(
        not missing,
        f"{section}.{missing[0] if missing else ''} must be given (recipe section [{section}])",
    )
    given = {
        field.name: _convert(f"{section}.{field.name}", hints[field.name], values[field.name])
        for field in fields(owner)
        if field.name in values
    }
    for field in fields(owner):
        if field.name in given and given[field.name] != field.default:
            _check_size(f"{section}.{field.name}", given[field.name])
    try:
        with named_in_section(section, owner):
            return owner(**given)
    except ValueError as error:
        raise ValueError(f"{error} (recipe section [{section}])") from error


@contextmanager
def named_in_section(section: str, owner: Any) -> Iterator[None]:
    """Name settings in the message of a ValueError as the recipe does: batch.eta, not eta.

    The packages below `config` do not know the sections, so their messages contain bare field
    names. A word counts as a field name if it begins the message, if ` = ` or ` {` follows it, or
    if it contains an underscore.

    Args:
        section: Name of the recipe's section.
        owner: The dataclass, or an instance of it, whose field names are replaced.
    """
    try:
        yield
    except ValueError as error:
        names = "|".join(re.escape(field.name) for field in fields(owner))
        bare = rf"(?<![\w.'\"/-])({names})(?![\w.'\"/-])" if names else r"(?!)"

        def qualified(found: re.Match[str]) -> str:
            before, after = found.string[: found.start()], found.string[found.end() :]
            is_setting = not before or after.startswith((" = ", " {")) or "_" in found[0]
            return f"{section}.{found[0]}" if is_setting else found[0]

        raise ValueError(re.sub(bare, qualified, str(error))) from error


def _convert(name: str, hint: Any, value: Any) -> Any:
    section = name.partition(".")[0]
    if isinstance(value, FlagText):
        value = str(value) if hint is str else _parse_flag(value)
    if hint is not str:
        value = _with_sizes(name, hint, value)
    wrong_bool = isinstance(value, bool) and hint is not bool
    try:
        return pydantic.TypeAdapter(hint).validate_python([value] if wrong_bool else value)
    except pydantic.ValidationError as error:
        found = error.errors()[0]
        size = found["type"] == "int_parsing_size"
        problem = "< 2^63" if size else found["msg"].removeprefix("Input should be ")
        raise ValueError(
            f"{name} must be {problem}, got {_shown(value)} (recipe section [{section}])"
        ) from error


def _with_sizes(name: str, hint: Any, value: Any) -> Any:
    """The value, with numbers in the place of sizes such as 600k, in lists too."""
    if isinstance(value, (list, tuple)) and str not in get_args(hint):
        return [_with_sizes(name, hint, item) for item in value]
    if not isinstance(value, str):
        return value
    number = read_gib(value) if name.endswith(".gib") else read_number(value)
    return value if number is None else number


def _check_size(name: str, value: Any) -> None:
    """Refuse numbers whose squares, inverses or conversions would overflow.

    float64 has all whole numbers below 2^53; a seed is not computed with.
    """
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_size(name, item)
    section = name.partition(".")[0]
    require(
        not isinstance(value, float) or value == 0 or SMALLEST <= abs(value) <= LARGEST,
        f"{name} must be 0, or from {SMALLEST} to {LARGEST} in size, got {_shown(value)} (recipe "
        f"section [{section}])",
    )
    bits = 63 if name == "run.seed" else 53
    require(
        not isinstance(value, int) or abs(value) < 2**bits,
        f"{name} must be > -2^{bits} and < 2^{bits}, got {_shown(value)} (recipe section "
        f"[{section}])",
    )


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
    return {section.chosen: owner, **section.parts}


class FlagText(str):
    """A value from the command line that is not yet converted to the setting's type."""


def _parse_flag(text: FlagText) -> Any:
    """Parse the text as a TOML value; return it unchanged if it is not one.

    A list such as [600k, 1M], which TOML does not know, becomes one of texts.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # Also of numbers with too many digits.
        plain = re.fullmatch(r"\s*\[([^\[\]\"']*)\]\s*", text)
        return [item.strip() for item in plain[1].split(",")] if plain else str(text)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _shown(value: Any) -> str:
    """The value as Python writes it, or its beginning."""
    try:
        text = repr(value)
    except ValueError:  # A whole number of thousands of digits.
        return "a number with too many digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _suggest(word: str, allowed: Sequence[str], settings: Sequence[tuple[str, str]] = ()) -> str:
    """What was meant by a word that is not allowed, or by settings of that (section, key)."""
    meant = [
        name
        for section, key in settings
        for name in settings_meant(key)
        if f"{section}.{key}" not in settings_meant(key)
    ]
    meant = meant or [repr(name) for name in difflib.get_close_matches(word, allowed, n=1)]
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""
