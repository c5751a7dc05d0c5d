"""Writing a recipe as TOML, with every setting and, if wanted, its help text."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import tomlkit

from adloco.config.recipe import Values
from adloco.config.sections import SECTIONS, Recipe
from adloco.setting import field_meanings


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a recipe, with its value."""

    section: str
    key: str
    value: Any
    meaning: str
    """Help text."""
    default: Any
    """None if the setting must be given."""


def settings(recipe: Recipe) -> Iterator[Setting]:
    """Every setting of a recipe, in the order of the sections."""
    for name, section in SECTIONS.items():
        choice = section.choice
        if choice:
            yield Setting(
                section=name,
                key=choice.key,
                value=choice.register.name_of(type(recipe.part(choice.part))),
                meaning=choice.help(),
                default=choice.default,
            )
        for part in [*([choice.part] if choice else []), *section.parts]:
            owner = recipe.part(part)
            meanings, given = field_meanings(owner.__class__), defaults(owner.__class__)
            for field in fields(owner):
                yield Setting(
                    section=name,
                    key=field.name,
                    value=getattr(owner, field.name),
                    meaning=meanings.get(field.name, ""),
                    default=given[field.name],
                )


def named_settings(recipe: Recipe) -> dict[str, Any]:
    """Values of all settings, by `section.key`."""
    return {f"{setting.section}.{setting.key}": setting.value for setting in settings(recipe)}


def idle_settings(recipe: Recipe) -> set[str]:
    """section.key of the settings of options of which all have their defaults."""
    return {
        f"{option.section}.{name}"
        for option in recipe.options.values()
        if option == type(option)()
        for name in defaults(type(option))
    }


def to_toml(recipe: Recipe, *, with_meanings: bool = False) -> str:
    """Write every setting as TOML; reading it back gives the same recipe.

    Options of lab/ that have their defaults are left out unless meanings are wanted, so that a run
    can be read where such an option was removed.

    Args:
        recipe: The recipe to write.
        with_meanings: Put the help text of each setting above it as a comment, and the default
            beside a value that differs from it.

    Raises:
        ValueError: A setting has a value that TOML cannot represent.
    """
    lines: list[str] = []
    section = ""
    left_out = set() if with_meanings else idle_settings(recipe)
    for setting in settings(recipe):
        if f"{setting.section}.{setting.key}" in left_out:
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        if with_meanings:
            lines += [f"# {line}" for line in setting.meaning.splitlines()]
        try:
            line = toml_line(setting.key, setting.value)
            if with_meanings and setting.default not in (None, setting.value):
                line += f"  # {toml_line('default', setting.default).replace(' =', ':', 1)}"
            lines.append(line)
        except TypeError as error:  # Only a user's own class can have such a default.
            raise ValueError(
                f"{setting.section}.{setting.key} is {setting.value!r}, which a recipe cannot "
                "hold; use a number, a text, a list or a table"
            ) from error
    return "\n".join(lines) + "\n"


def to_values(recipe: Recipe) -> Values:
    """Plain values of all settings, by section and key."""
    return tomllib.loads(to_toml(recipe))


def defaults(owner: type) -> dict[str, Any]:
    """The default of each field of a dataclass; None for a field that must be given."""
    return {
        field.name: field.default_factory()
        if field.default_factory is not MISSING
        else None
        if field.default is MISSING
        else field.default
        for field in fields(owner)
    }


def toml_line(key: str, value: Any) -> str:
    """A key and its value as a line of TOML, tables and lists inline.

    Raises:
        TypeError: TOML cannot represent the value.
    """
    if isinstance(value, Mapping):
        inner = ", ".join(toml_line(name, item) for name, item in value.items())
        return f"{key} = {{ {inner} }}" if inner else f"{key} = {{}}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(toml_line("x", item).removeprefix("x = ") for item in value)
        return f"{key} = [{items}]"
    line = tomlkit.dumps({key: value}).strip()
    # tomlkit writes some characters as they are that could control a terminal.
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\U{ord(each):08x}" for each in line
    )
