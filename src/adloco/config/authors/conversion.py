"""A recipe from the configuration file of the AdLoCo authors' script, and what becomes of each of
its keys.
"""

import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from adloco.config.authors.entries import Entry, read_entries
from adloco.config.authors.keys import KEYS, Given, Settings, read_words
from adloco.config.recipe import Values, build_recipe
from adloco.config.recipe_text import toml_line
from adloco.config.sections import SECTIONS
from adloco.errors import require

NAMES = {name: name for name in KEYS} | {key.older: name for name, key in KEYS.items() if key.older}
"""Name of a key, current or older -> its current name."""
DATASETS = {"microllama": ("c4", None), "bert": ("imdb",)}
"""model_type -> the datasets that fit it; None: our default corpus, where the file names none."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of a key."""

    entry: Entry
    known: bool = True
    """False if the authors' script has no such key."""
    settings: Settings
    """The settings that it gives; empty if it has no counterpart here."""
    remark: str
    """What differs in meaning, or why it gives nothing; may be empty."""

    @property
    def source(self) -> str:
        """Where it is in the file, and its value."""
        where = f"line {self.entry.line}" if self.entry.line else "not given, so"
        return f"{where} {self.entry.key}: {self.entry.text}".removesuffix(": ")

    @property
    def explained(self) -> str:
        """Where it is in the file, its value, and the remark."""
        return f"{self.source}. {self.remark}" if self.remark else self.source

    def of_section(self, section: str) -> Settings:
        """The settings of a section, by their bare names."""
        return {
            name.removeprefix(f"{section}."): value
            for name, value in self.settings.items()
            if name.startswith(f"{section}.")
        }


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
        return {
            section: {
                name: value for key in self.keys for name, value in key.of_section(section).items()
            }
            for section in SECTIONS
        }

    def to_toml(self) -> str:
        """The recipe, with a comment above its settings that says which key gave them."""
        lines = _comment(
            f"Written by `adloco convert` from {self.name}, a configuration of the AdLoCo authors' "
            "script. Above each setting: the key it comes from, and what differs in meaning."
        )
        explained = set()
        for section in SECTIONS:
            giving = [key for key in self.keys if key.of_section(section)]
            lines += ["", f"[{section}]"] if giving else []
            for key in giving:
                lines += _comment(key.source if key.source in explained else key.explained)
                explained.add(key.source)
                lines += [toml_line(*setting) for setting in key.of_section(section).items()]
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
    entries = read_entries(path)
    known = [entry for entry in entries if _name(entry)]
    require(
        bool(known),
        f"{path} has none of the keys that the AdLoCo authors' configuration has, such as "
        f"{', '.join(list(NAMES)[:4])}; docs/from-the-authors-script.md lists all",
    )
    # A current name goes before an older one; of equal names the last one counts, as in their YAML.
    used = {_name(entry): entry for entry in sorted(known, key=lambda one: one.key in KEYS)}
    given = {name: key.default for name, key in KEYS.items()}
    # `pretrained=True` in braces is a key of that name without a value, for YAML.
    given |= {name: _typed(path, entry) for name, entry in used.items() if "=" not in entry.key}
    keys = [_converted(path, entry, used, given) for entry in entries]
    missing = []
    for name, key in KEYS.items():
        if name not in used and (key.gives or key.choices):
            entry = Entry(line=0, key=name, value=key.default, text=str(key.default))
            found = _converted(path, entry, used, given) if key.default is not None else None
            keys += [found] if found and found.settings else []
            missing += [] if found else [name]
    _check_model(path, given)
    conversion = Conversion(name=path.name, keys=tuple(keys), missing=tuple(missing))
    try:
        build_recipe(conversion.values)
    except ValueError as error:
        raise ValueError(f"{path} does not give a valid recipe: {error}") from error
    return conversion


def _name(entry: Entry) -> str:
    """The current name of a key; empty if it is unknown."""
    return NAMES.get(entry.key.partition("=")[0], "")


def _typed(path: Path, entry: Entry) -> Any:
    kind = KEYS[_name(entry)].kind
    wrong_bool = isinstance(entry.value, bool) and kind not in (bool, object)
    try:
        return pydantic.TypeAdapter(kind).validate_python([] if wrong_bool else entry.value)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ValueError(
            f"{path} line {entry.line}: {entry.key} must be {problem}, got {entry.value!r}"
        ) from error


def _converted(path: Path, entry: Entry, used: Mapping[str, Entry], given: Given) -> Converted:
    name = _name(entry)
    if not name:
        nearest = difflib.get_close_matches(entry.key, NAMES, n=1)
        meant = f"; did you mean {nearest[0]}?" if nearest else "."
        remark = f"The authors' script has no such key{meant}"
        return Converted(entry=entry, known=False, settings={}, remark=remark)
    other = used.get(name, entry)
    if other is not entry:
        remark = f"Not used, because {other.key} is given in line {other.line}."
        return Converted(entry=entry, settings={}, remark=remark)
    key, value, rows = KEYS[name], given[name], read_words()
    require(
        not key.choices or "" in key.choices or value in key.choices,
        f"{path} line {entry.line}: {entry.key} must be one of {', '.join(key.choices)}, "
        f"got {entry.text!r}",
    )
    settings = key.settings(value, given)
    row = rows.get(f"{name}: {value}") or rows[name]
    first = next((one for one in row.keys if one in used), name)
    here = "" if settings or row.ours == "none" else f"Here: {row.ours}. "
    remark = f"{here}{row.differs}".replace("`", "") if name == first else f"As {first}."
    return Converted(entry=entry, settings=settings, remark=remark)


def _check_model(path: Path, given: Given) -> None:
    model, dataset = given["model_type"], given["dataset"]
    require(
        model is None or model in DATASETS,
        f"{path}: model_type must be one of {', '.join(DATASETS)}, got {model!r}",
    )
    allowed = DATASETS.get(model, (dataset,))
    require(
        dataset in allowed,
        f"{path}: dataset must be {allowed[0]} with model_type {model}, got {dataset!r}",
    )


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
