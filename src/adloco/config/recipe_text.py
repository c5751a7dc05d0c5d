"""A recipe written out: every setting with its value and its meaning, as TOML that reads back to
the same recipe.
"""

import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import docstring_parser
import tomli_w

from adloco.config.recipe import Values
from adloco.config.sections import SECTIONS, Recipe


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One resolved setting, with its meaning."""

    section: str
    key: str
    value: Any
    meaning: str


def settings(recipe: Recipe) -> Iterator[Setting]:
    """Every setting of a recipe, in the order of the sections."""
    for name, section in SECTIONS.items():
        if section.choice:
            owner = getattr(recipe, section.chosen)
            yield Setting(
                section=name,
                key=section.choice.key,
                value=section.choice.register.name_of(type(owner)),
                meaning=section.choice.help(),
            )
        for part in [*([section.chosen] if section.choice else []), *section.parts]:
            owner = getattr(recipe, part)
            meanings = field_meanings(owner.__class__)
            for field in fields(owner):
                yield Setting(
                    section=name,
                    key=field.name,
                    value=getattr(owner, field.name),
                    meaning=meanings.get(field.name, ""),
                )


def named_settings(recipe: Recipe) -> dict[str, Any]:
    """The value of every setting by section.key."""
    return {f"{setting.section}.{setting.key}": setting.value for setting in settings(recipe)}


def to_toml(recipe: Recipe, *, with_meanings: bool = False) -> str:
    """The recipe as TOML, every field; reading it back gives the same recipe."""
    lines: list[str] = []
    section = ""
    for setting in settings(recipe):
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        if with_meanings:
            lines += [f"# {line}" for line in setting.meaning.splitlines()]
        try:
            lines.append(_toml_line(setting.key, setting.value))
        except TypeError as error:  # Of a class of the user's own.
            raise ValueError(
                f"{setting.section}.{setting.key} is {setting.value!r}, which a recipe cannot "
                "hold; "
                "use a number, a text, a list or a table"
            ) from error
    return "\n".join(lines) + "\n"


def to_values(recipe: Recipe) -> Values:
    """The recipe as sections of plain values."""
    return tomllib.loads(to_toml(recipe))


@functools.cache
def field_meanings(owner: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, those it inherits included."""
    parents = [kind for kind in reversed(owner.__mro__) if kind is not object]
    described = [docstring_parser.parse_from_object(kind).params for kind in parents]
    return {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for parameters in described
        for parameter in parameters
    }


def _toml_line(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(_toml_line(name, item) for name, item in value.items())
        return f"{key} = {{ {inner} }}" if inner else f"{key} = {{}}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(_toml_line("x", item).removeprefix("x = ") for item in value)
        return f"{key} = [{items}]"
    return tomli_w.dumps({key: value}).strip()
