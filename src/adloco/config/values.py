"""Values of settings as users write them: flags, sizes such as 600k, their conversion to the types
of a class, and what each type is called in messages.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from decimal import Decimal
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic

from adloco.errors import one_of, require, shown

SMALLEST, LARGEST = 1e-38, 1e38
"""Sizes of numbers other than 0, about those of float32: their squares fit in float64."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Python's sign for a byte of the command line that is not UTF-8."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}
LISTS = (tuple, list, Sequence)


class FlagText(str):
    """A value from the command line that is not yet converted to the setting's type."""


def plain_value(name: str, hint: Any, value: Any) -> Any:
    """A value as TOML has it: read from the text of a flag, with numbers in the place of sizes.

    Args:
        name: section.key
        hint: The setting's type.
        value: What was given in a file, on the line or from Python.
    """
    require(
        not isinstance(value, str) or not HALF_PAIR.search(value),
        f"{name} must be UTF-8, as a recipe is, got {shown(str(value))}; rename what it names",
    )
    require(
        not isinstance(value, str) or "\0" not in value,
        f"{name} must have no null character, got {shown(str(value))}; remove it",
    )
    if isinstance(value, FlagText):
        value = str(value) if hint is str else _parse_flag(value, get_origin(hint) in LISTS)
    return value if hint is str else _with_sizes(name, hint, value)


def construct(owner: type, given: Mapping[str, Any]) -> Any:
    """An object of a dataclass, with these values converted to the types of its fields.

    Raises:
        ValueError: A value is missing, has a wrong type, or is refused by the class; the message
            begins with its name. Or a field has a type that cannot be converted to.
    """
    hints = get_type_hints(owner, include_extras=True)
    checked = {
        key: value if takes_truths(hints[key]) else _no_truths(value, hints[key])
        for key, value in given.items()
    }
    required = any(each.default is each.default_factory is MISSING for each in fields(owner))
    try:
        # Without values there is nothing to convert, and an adapter takes a millisecond to build.
        return adapter(owner).validate_python(checked) if checked or required else owner()
    except pydantic.PydanticSchemaGenerationError as error:
        raise ValueError(
            f"{owner.__module__}:{owner.__qualname__} has a setting of a type that a recipe cannot "
            f"hold ({str(error).partition('. ')[0]}); use numbers, texts, lists and tables"
        ) from error
    except pydantic.ValidationError as error:
        found = error.errors()[0]
        if found["type"] in ("value_error", "assertion_error"):  # Raised by the class itself.
            own = found["ctx"]["error"]
            raise (own if isinstance(own, ValueError) else ValueError(str(own))) from None
        key = str(found["loc"][0])
        kind = kind_of(hints[key])
        require(key in given, f"{key} must be given{kind and ', as '}{kind}")
        kind = kind or found["msg"].removeprefix("Input should be ")
        raise ValueError(f"{key} must be {kind}, got {shown(given[key])}") from error


def takes_truths(hint: Any) -> bool:
    """True if true and false are values of a type."""
    return hint is bool or bool in get_args(hint)


def _no_truths(value: Any, hint: Any) -> Any:
    """The value, with what fits no type in the place of each boolean, alone or in a list of
    numbers: pydantic would take true for 1, and [true] for [1].
    """
    if isinstance(value, (list, tuple)) and {int, float} & {*get_args(hint)}:
        return [_no_truths(item, hint) for item in value]
    return [[value]] if isinstance(value, bool) else value


@functools.cache
def adapter(kind: type) -> pydantic.TypeAdapter[Any]:
    """Makes values of a type from what was read, or raises ValidationError."""
    return pydantic.TypeAdapter(kind)


def kind_of(hint: Any) -> str:
    """The values of a type, in words; empty if they cannot be described."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(inside)
    if origin in (Union, UnionType):
        kinds = [kind_of(each) for each in inside]
        return one_of(kinds) if all(kinds) else ""
    if origin in (dict, Mapping):
        return f"a table such as {{ {8 if inside[:1] == (int,) else 'key'} = 1 }}"
    if origin in LISTS:
        number = "" if origin is not tuple or ... in inside else f"{len(inside)} "
        items = ITEMS.get(inside[0], "")
        return items and f"a list of {number}{items}"
    return KINDS.get(hint, "") if isinstance(hint, type) else ""


def check_size(name: str, value: Any) -> None:
    """Refuse numbers whose squares, inverses or conversions would overflow.

    float64 has all whole numbers below 2^53; a seed is not computed with.
    """
    if isinstance(value, (list, tuple)):
        for item in value:
            check_size(name, item)
    require(
        not isinstance(value, float) or value == 0 or SMALLEST <= abs(value) <= LARGEST,
        f"{name} must be 0, or from {SMALLEST} to {LARGEST} in size, got {shown(value)}",
    )
    bits = 63 if name == "run.seed" else 53
    require(
        not isinstance(value, int) or abs(value) < 2**bits,
        f"{name} must be > -2^{bits} and < 2^{bits}, got {shown(value)}",
    )


def _parse_flag(text: str, is_list: bool) -> Any:
    """Parse the text as a TOML value; return it unchanged if it is not one.

    A list may also be written without quotes, as in [600k, 1M], and without brackets.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # Also of numbers with too many digits.
        words = text.strip()
        if words.startswith("[") and words.endswith("]"):
            words, is_list = words[1:-1], True
        if not is_list or set("[]{}\"'") & set(words):
            return str(text)
        return [word.strip() for word in words.split(",") if word.strip()]
    return [value] if is_list and not isinstance(value, (list, dict)) else value


def _with_sizes(name: str, hint: Any, value: Any) -> Any:
    """The value, with numbers in the place of texts that are some, in lists too."""
    if isinstance(value, (list, tuple)) and str not in get_args(hint):
        return [_with_sizes(name, hint, item) for item in value]
    if isinstance(value, float) and value.is_integer() and float not in (hint, *get_args(hint)):
        return int(value)  # TOML takes 1e6 for a float.
    if not isinstance(value, str):
        return value
    number = read_gib(value) if name.endswith(".gib") else read_number(value)
    if number is None:
        with suppress(ValueError):
            return float(value)  # For instance 1e-5, or nan.
    return value if number is None else number


COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
"""Factors by suffix. m is none: it is milli to some and million to others."""
BYTES = {
    "B": 1,
    **{f"{letter}B": 10**power for letter, power in zip("kMGT", (3, 6, 9, 12), strict=True)},
    **{f"{letter}iB": 2**power for letter, power in zip("KMGT", (10, 20, 30, 40), strict=True)},
}
"""Bytes by unit."""


def read_number(text: str) -> int | float | None:
    """The number that a text such as 600k or 1e6 is, an int if it is whole; None if it is none."""
    return _read(text, COUNTS)


def read_gib(text: str) -> int | float | None:
    """The GiB that a text such as 512MiB or 2GB stands for; None if it is none."""
    size = _read(text, BYTES)
    return None if size is None else size / 2**30


def _read(text: str, units: dict[str, int]) -> int | float | None:
    found = re.fullmatch(r"\s*([\d_]{0,30}\d(?:\.\d+)?(?:e\d{1,2})?)\s?([A-Za-z]*)\s*", text)
    if not found or found[2] not in units:
        return None
    number = Decimal(found[1]) * units[found[2]]
    return int(number) if number == number.to_integral_value() else float(number)
