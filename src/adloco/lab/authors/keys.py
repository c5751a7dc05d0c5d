"""The keys of the AdLoCo authors' configuration, as `keys.md` has them: the one table of their
values, of the settings that they give, and of what differs in meaning.

A cell of settings names each as `section.key`, which takes the key's value, or as `section.key =
VALUE` in TOML. What stands in brackets is only mentioned. This module has what a cell cannot say:
settings that are computed, and keys that count only beside another one.
"""

import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import pydantic
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from adloco.config.recipe import Values
from adloco.errors import require
from adloco.rules.controller import BatchGuards

Given = Mapping[str, Any]
"""The values of an authors' configuration by key; None where a key is missing."""

KINDS: Mapping[str, Any] = {
    "text": str,
    "text or nothing": str | None,
    "text or whole number": str | int,
    "whole number": int,
    "whole number > 0": PositiveInt,
    "whole number >= 0": NonNegativeInt,
    "number > 0": PositiveFloat,
    "true or false": bool,
    "anything": object,
}
"""Type of a value by its name in the table."""
DILOCO = ("distributed_algo", "DiLoCo")
ONLY_WITH = {
    "c4_language": ("dataset", "c4"),
    "c4_streaming": ("dataset", "c4"),
    "lr_outer": DILOCO,
    "merging_policy": DILOCO,
    "merge_frequency": DILOCO,
    "ETA": ("sampling_method", "norm_test"),
}
"""Key -> another key and the value that it must have; else nothing is given."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table."""

    keys: tuple[str, ...]
    """A key inside `model_config` is model_config.name; a row about one value is `key: value`."""
    older: str
    """Name of the key in the configuration that the authors' README shows; may be empty."""
    kind: str
    default: Any
    """Value of a missing key; None: the settings keep their defaults here."""
    ours: str
    """The settings here, in Markdown."""
    gives: Mapping[str, Any]
    """Setting -> its value; None for the key's own."""
    differs: str
    """Differences in meaning, in sentences of Markdown."""


@functools.cache
def read_rows() -> Mapping[str, Row]:
    """The rows of the table by key, or by `key: value` where a row is about one value."""
    found: dict[str, Row] = {}
    text = resources.files("adloco.lab.authors").joinpath("keys.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        theirs, value, ours, differs = (cell.strip() for cell in line[1:-1].split("|"))
        keys = tuple(re.findall("`(.+?)`", theirs))
        kind, _, default = value.partition(", else ")
        settings = re.findall(r"`(\w+\.\w+)(?: = (.+?))?`", re.sub(r"\(.*?\)", "", ours))
        row = Row(
            keys=keys,
            older="".join(re.findall(r"\((\w+)\)", theirs)),
            kind=kind,
            default=typed(kind, default) if default else None,
            ours=ours,
            gives={
                name: tomllib.loads(f"value = {text}")["value"] if text else None
                for name, text in settings
            },
            differs=differs,
        )
        found |= dict.fromkeys(keys, row)
    return found


@functools.cache
def first_rows() -> Mapping[str, Row]:
    """The first row of each key, which has its type and its default."""
    found: dict[str, Row] = {}
    for key, row in read_rows().items():
        found.setdefault(key.partition(":")[0], row)
    return found


def typed(kind: str, value: Any) -> Any:
    """A value as one of a kind.

    Raises:
        ValueError: It is not of that kind; the message is the rest of a sentence.
    """
    wrong_bool = isinstance(value, bool) and kind not in ("true or false", "anything")
    try:
        return pydantic.TypeAdapter(KINDS[kind]).validate_python([] if wrong_bool else value)
    except pydantic.ValidationError as error:
        article = "" if kind == "true or false" else "a "
        raise ValueError(f"must be {article}{kind}, got {value!r}") from error


def row_of(name: str, value: Any) -> Row:
    """The row of a key with this value.

    Raises:
        ValueError: The key has no such value; the message is the rest of a sentence.
    """
    rows, choice = read_rows(), f"{name}: {value}"
    choices = [key.partition(": ")[2] for key in rows if key.startswith(f"{name}: ")]
    known = choice in rows or name in rows
    require(known, f"must be one of {', '.join(choices)}, got {str(value)!r}")
    return rows[choice] if choice in rows else rows[name]


def settings_of(name: str, given: Given) -> Values:
    """The settings that a key gives with its value, by section."""
    value, (other, wanted) = given[name], ONLY_WITH.get(name, (name, given[name]))
    if value is None or given[other] != wanted:
        return {}
    found: Values = {}
    for setting, constant in row_of(name, value).gives.items():
        ours = value if constant is None else constant
        if setting in COMPUTED:
            ours = COMPUTED[setting](value, given)
        if ours is not None:
            section, _, key = setting.partition(".")
            found.setdefault(section, {})[key] = ours
    return found


def _workers(value: Any, given: Given) -> int:
    """Workers of each trainer at the start."""
    nodes = len(str(given["CUDA_VISIBLE_DEVICES"]).split(",")) * given["nodes_per_gpu"]
    return max(1, int(nodes // given["num_init_trainers"]))


def _initial(value: int, given: Given) -> int:
    """The first batch of a trainer; a test compares the samples of a worker, so it needs two."""
    tests = given["sampling_method"] in ("norm_test", "augmented_inner_product_test")
    return _workers(value, given) * max(value, 2 if tests else 1)


def _validation_rows(value: Any, given: Given) -> Any:
    """Rows of `val_size`. Without it, C4's first 100: its whole split has 364,608, and
    `evaluation.windows` reads 64 windows.
    """
    if value == "c4":
        return None if given["val_size"] else 100
    return None if given["dataset"] == "imdb" else value


COMPUTED: Mapping[str, Callable[[Any, Given], Any]] = {
    "method.workers_per_trainer": _workers,
    "batch.initial": _initial,
    "batch.minimum": _initial,
    "batch.maximum": lambda value, given: max(_initial(value, given), BatchGuards().maximum),
    "data.samples": lambda value, given: None if given["dataset"] == "imdb" else value,
    "data.validation_samples": _validation_rows,
    "task.evaluation_per_class": lambda value, given: value if given["dataset"] == "imdb" else None,
    "model.pretrained": lambda value, given: value if given["model_config.name"] else None,
}
"""Setting -> its value from that of the key and all others; None: the setting is left out."""
