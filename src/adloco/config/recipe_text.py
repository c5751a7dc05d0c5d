"""The table of all settings, and a recipe written as TOML, if wanted with their help texts."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomlkit

from adloco.config.finding import choices_with
from adloco.config.recipe import Values
from adloco.config.sections import SECTIONS, Choice, Recipe
from adloco.config.values import takes_truths
from adloco.setting import field_meanings


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that a recipe can have."""

    section: str
    key: str
    value: Any
    """Its value in the recipe; its default if the recipe does not have it."""
    meaning: str
    """Help text; of a key that chooses a class, without the classes."""
    default: Any
    """None if the setting must be given."""
    of: type | Choice
    """The class that has it as a field, or what it chooses from."""
    chosen_by: str = ""
    """The choices that have it, such as `batch.rule warmup`; empty if all have."""
    used: bool = True
    """True if the recipe has it."""

    @property
    def name(self) -> str:
        """section.key"""
        return f"{self.section}.{self.key}"

    @property
    def help(self) -> str:
        """The meaning, and a line for each class to choose from."""
        return self.of.help() if isinstance(self.of, Choice) else self.meaning

    @property
    def hint(self) -> Any:
        """Type of the setting."""
        if isinstance(self.of, Choice):
            return Literal[tuple(self.of.register.classes)]
        return get_type_hints(self.of)[self.key]

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values; empty if they cannot be listed."""
        hint = self.hint
        if takes_truths(hint):
            return ("true", "false", *(each for part in get_args(hint) for each in get_args(part)))
        return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def known_settings(recipe: Recipe) -> Iterator[Setting]:
    """Every setting, in the order of the sections: those of the recipe, and those that other
    choices would add to it, for instance another `batch.rule`. One that choices explain in other
    words, or with other defaults, comes once for each of these.
    """
    for name, section in SECTIONS.items():
        choice = section.choice
        parts = [recipe.part(part) for part in [*([choice.part] if choice else []), *section.parts]]
        values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
        owners: list[type] = [type(part) for part in parts]
        if choice:
            yield Setting(
                section=name,
                key=choice.key,
                value=choice.register.name_of(owners[0]),
                meaning=choice.meaning,
                default=choice.default,
                of=choice,
            )
            owners[1:1] = choice.register.classes.values()
        done: list[tuple[Any, ...]] = []
        for owner in owners:
            used = owner in map(type, parts)
            for key, default in defaults(owner).items():
                told = _told(owner, key)
                if told in done:
                    continue
                done.append(told)
                yield Setting(
                    section=name,
                    key=key,
                    value=values[key] if used else default,
                    meaning=field_meanings(owner).get(key, ""),
                    default=default,
                    of=owner,
                    chosen_by=_chosen_by(name, choice, owner, told) if choice else "",
                    used=used,
                )


def _told(owner: type, key: str) -> tuple[str, str, str]:
    """What a reader must know of a field, to compare it with that of another class."""
    return key, field_meanings(owner).get(key, ""), repr(defaults(owner)[key])


def _chosen_by(section: str, choice: Choice, owner: type, told: tuple[str, str, str]) -> str:
    """`Setting.chosen_by` of a class's field."""
    classes = choice.register.classes
    if owner not in classes.values():
        return ""
    words = choices_with(section, told[0])
    same = [word for word in words if _told(classes[word], told[0]) == told]
    return "" if len(same) == len(classes) else f"{section}.{choice.key} {' or '.join(same)}"


def settings(recipe: Recipe) -> Iterator[Setting]:
    """Every setting of a recipe, in the order of the sections."""
    return (setting for setting in known_settings(recipe) if setting.used)


def named_settings(recipe: Recipe) -> dict[str, Any]:
    """Values of all settings, by `section.key`."""
    return {setting.name: setting.value for setting in settings(recipe)}


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

    with_meanings: Put the help text of each setting above it as a comment, and the default beside a
        value that differs from it.

    Raises:
        ValueError: A setting has a value that TOML cannot represent.
    """
    lines: list[str] = []
    section = ""
    left_out = set() if with_meanings else idle_settings(recipe)
    for setting in settings(recipe):
        if setting.name in left_out:
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        if with_meanings:
            lines += [f"# {line}" for line in setting.help.splitlines()]
        try:
            line = toml_line(setting.key, setting.value)
            if with_meanings and setting.default not in (None, setting.value):
                line += f"  # {toml_line('default', setting.default).replace(' =', ':', 1)}"
            lines.append(line)
        except TypeError as error:  # Only a user's own class can have such a default.
            raise ValueError(
                f"{setting.name} is {setting.value!r}, which a recipe cannot hold; use a number, a "
                "text, a list or a table"
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


def value_text(value: Any) -> str:
    """A value as a reader sees it: a text without quotes, all else as in a recipe."""
    if isinstance(value, str):
        return value
    try:
        return toml_line("x", value).removeprefix("x = ")
    except TypeError:  # A default that no recipe can hold.
        return str(value)


def toml_line(key: str, value: Any) -> str:
    """A key and its value as a line of TOML, tables and lists inline.

    Raises:
        TypeError: TOML cannot represent the value.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        key = tomlkit.string(key).as_string()
    if isinstance(value, Mapping):
        inner = ", ".join(toml_line(name, item) for name, item in value.items())
        return f"{key} = {{ {inner} }}" if inner else f"{key} = {{}}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(toml_line("x", item).removeprefix("x = ") for item in value)
        return f"{key} = [{items}]"
    line = f"{key} = {tomlkit.dumps({'x': value}).strip().removeprefix('x = ')}"
    # tomlkit writes some characters as they are that could control a terminal.
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\U{ord(each):08x}" for each in line
    )
