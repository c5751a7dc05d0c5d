"""A recipe from the configuration file of the AdLoCo authors' script, and what becomes of each of
its keys.
"""

import difflib
import functools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from adloco.config.recipe import Values, build_recipe
from adloco.config.recipe_text import toml_line
from adloco.config.sections import SECTIONS
from adloco.errors import require
from adloco.lab.authors.keys import Given, first_rows, row_of, settings_of, typed

FITTING = {
    *((model, dataset) for model in (None, "microllama") for dataset in ("c4", None)),
    *((model, "imdb") for model in (None, "bert")),
}
"""Each model_type with the datasets that fit it; None: not given."""
NESTED = "model_config"
"""The key that holds keys and values of its own."""
LONGEST_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of converting one key."""

    key: str
    """One inside `model_config` is model_config.name."""
    value: Any
    given: bool = True
    """False if the file leaves the key out, whose value is then the default of their script."""
    known: bool = True
    """False if the authors' script has no such key."""
    settings: Values
    """The settings that it gives; empty if it has no counterpart here."""
    remark: str
    """Difference in meaning, or why the key gives nothing; may be empty."""

    @property
    def source(self) -> str:
        """The key and its value, on one line that a comment of TOML may hold."""
        given = "" if self.given else "not given, so "
        value = textwrap.shorten(str(self.value), LONGEST_VALUE)
        line = f"{given}{self.key}" + ("" if self.value is None else f": {value}")
        return line if line.isprintable() else repr(line)

    @property
    def explained(self) -> str:
        """The key, its value, and the remark."""
        return f"{self.source}. {self.remark}" if self.remark else self.source


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A recipe made from an authors' configuration."""

    name: str
    """Name of the file."""
    keys: tuple[Converted, ...]
    """Every key in the order of the file; then those that it leaves out and their script has a
    default for.
    """
    missing: tuple[str, ...]
    """Keys that the file leaves out, whose settings keep their defaults here."""

    @property
    def values(self) -> Values:
        """The recipe by section and key."""
        found: Values = {}
        for key in self.keys:
            for section, own in key.settings.items():
                found[section] = found.get(section, {}) | own
        return found

    def to_toml(self) -> str:
        """The recipe, with a comment above its settings that says which key gave them."""
        lines = _comment(
            f"Written by `adloco convert` from {self.name}, a configuration of the AdLoCo authors' "
            "script. Above each setting: the key it comes from, and what differs in meaning."
        )
        explained = set()
        for section in SECTIONS:
            giving = [key for key in self.keys if section in key.settings]
            lines += ["", f"[{section}]"] if giving else []
            for key in giving:
                lines += _comment(key.source if key.source in explained else key.explained)
                explained.add(key.source)
                lines += [toml_line(*setting) for setting in key.settings[section].items()]
        idle = [key for key in self.keys if not key.settings]
        lines += ["", "# Keys that give no setting:"] if idle else []
        for key in idle:
            lines += _comment(key.explained)
        return "\n".join(lines) + "\n"


def convert(path: Path) -> Conversion:
    """Make a recipe from an authors' configuration file, in YAML.

    Raises:
        ValueError: The file is no such configuration, a value has a wrong type, or the recipe would
            not be valid.
    """
    rows, names = first_rows(), _names()
    content = _read(path)
    known = [key for key in content if _bare(key) in names]
    require(
        bool(known),
        f"{path} has none of the keys that the AdLoCo authors' configuration has, such as "
        f"{', '.join(list(names)[:4])}; give the config.yaml of their repository",
    )
    # A current name goes before an older one.
    used = {names[_bare(key)]: key for key in sorted(known, key=lambda key: key in rows)}
    given = {name: row.default for name, row in rows.items()}
    for name, key in used.items():
        # `pretrained=True` in braces is a key of that name without a value, for YAML.
        if "=" not in key:
            given[name] = _typed(path, key, name, content[key])
    keys = [_converted(key, value, used, given) for key, value in content.items()]
    missing = []
    for name, row in rows.items():
        if name in used or not row.gives:
            continue
        if row.default is None:
            missing.append(name)
        elif settings_of(name, given):
            keys.append(replace(_converted(name, row.default, used, given), given=False))
    model, dataset = given["model_type"], given["dataset"]
    require(
        (model, dataset) in FITTING,
        f"{path}: dataset must be {'imdb' if model == 'bert' else 'c4'} with model_type {model}, "
        f"got {dataset!r}",
    )
    conversion = Conversion(name=path.name, keys=tuple(keys), missing=tuple(missing))
    try:
        build_recipe(conversion.values)
    except ValueError as error:
        raise ValueError(f"{path} does not give a valid recipe: {error}") from error
    return conversion


@functools.cache
def _names() -> dict[str, str]:
    """Name of a key, current or older -> its current name."""
    rows = first_rows()
    older = {row.older: name for name, row in rows.items() if row.older}
    return {name: name for name in rows} | older


class _Once(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses keys that are given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is given twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _read(path: Path) -> dict[str, Any]:
    """The keys of a YAML file with their values, those inside `model_config` by model_config.name.

    Raises:
        ValueError: The file does not exist, is not valid YAML, or does not consist of keys.
    """
    require(path.is_file(), f"there is no file {str(path)!r}; name a configuration in YAML")
    try:
        content = yaml.load(path.read_bytes(), _Once)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML ({reason}); correct it") from error
    nested = content.pop(NESTED, {}) if isinstance(content, dict) else {}
    for what, found in (("the file", content), (NESTED, nested)):
        require(
            isinstance(found, dict),
            f"{path} must be a configuration of keys and values, as `ETA: 0.8`, but {what} holds "
            "none",
        )
    inside = {f"{NESTED}.{key}": value for key, value in nested.items()}
    return {str(key): value for key, value in content.items()} | inside


def _bare(key: str) -> str:
    """The name of a key without the value that braces in YAML make a part of it."""
    return key.partition("=")[0]


def _typed(path: Path, key: str, name: str, value: Any) -> Any:
    try:
        found = typed(first_rows()[name].kind, value)
        row_of(name, found)
    except ValueError as error:
        raise ValueError(f"{path}: {key} {error}") from error
    return found


def _converted(key: str, value: Any, used: Mapping[str, str], given: Given) -> Converted:
    names = _names()
    name = names.get(_bare(key))
    if name is None:
        nearest = difflib.get_close_matches(key, names, n=1)
        meant = f"; did you mean {nearest[0]}?" if nearest else "."
        remark = f"The authors' script has no such key{meant}"
        return Converted(key=key, value=value, known=False, settings={}, remark=remark)
    other = used.get(name, key)
    if other != key:
        remark = f"Not used, because {other} is given too."
        return Converted(key=key, value=value, settings={}, remark=remark)
    row, settings = row_of(name, given[name]), settings_of(name, given)
    first = next((one for one in row.keys if one in used), name)
    nearest_setting = row.ours.removeprefix("none").strip(" ()")
    here = f"Here: {nearest_setting}. " if nearest_setting and not settings else ""
    remark = f"{here}{row.differs}".replace("`", "") if name == first else f"As {first}."
    return Converted(key=key, value=value, settings=settings, remark=remark)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
