"""The errors that users see, each with one sentence that says what to change."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

LONGEST_SHOWN = 200
"""Characters of a value in a message."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition is true.

    The message says what was wrong, the value received, what is allowed and what to change.
    """
    if not condition:
        raise ValueError(message)


class SettingError(ValueError):
    """A setting has a value that it cannot have.

    A class of settings does not know which section of a recipe it is, so its errors name settings
    as the class does; `named` names them as the recipe does.

    problem: The rest of the sentence. In it, {name} is the name of another setting of the owner,
        and {name=} its name and value.
    """

    def __init__(self, owner: Any, field: str, problem: str) -> None:
        super().__init__(owner, field, problem)
        self.owner, self.field, self.problem = owner, field, problem

    def named(self, section: str = "") -> str:
        """The sentence, with section.key for each setting."""
        before, text = f"{section}." if section else "", self.problem
        for other in fields(self.owner):
            name = f"{before}{other.name}"
            text = text.replace(f"{{{other.name}}}", name)
            if f"{{{other.name}=}}" in text:
                both = f"{name} = {shown(getattr(self.owner, other.name))}"
                text = text.replace(f"{{{other.name}=}}", both)
        return f"{before}{self.field} {text}"

    def __str__(self) -> str:
        return self.named()


def require_setting(condition: bool, owner: Any, field: str, problem: str) -> None:
    """Raise SettingError unless the condition is true; the sentence ends with the field's value."""
    if not condition:
        raise SettingError(owner, field, f"{problem}, got {shown(getattr(owner, field))}")


def require_range(
    owner: Any,
    *names: str,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise SettingError unless each of these fields is a number between the bounds."""
    low, high = at_least if above is None else above, at_most if below is None else below
    opening, closing = "[" if above is None else "(", "]" if below is None else ")"
    if low is not None and high is not None:
        problem = f"must be in {opening}{low:g}, {high:g}{closing}"
    elif low is not None:
        problem = f"must be {'>=' if above is None else '>'} {shown(low)}"
    else:
        problem = f"must be {'<=' if below is None else '<'} {shown(high)}"
    for name in names:
        value = getattr(owner, name)
        require_setting(hasattr(value, "__float__"), owner, name, "must be a number")
        # Of nan every comparison is false.
        enough = low is None or (value >= low if above is None else value > low)
        little = high is None or (value <= high if below is None else value < high)
        require_setting(enough and little, owner, name, problem)


def require_choices(owner: Any) -> None:
    """Raise SettingError unless each field with a Literal type has one of its values."""
    kind: type = type(owner)
    for name, allowed in _choices(kind).items():
        known = getattr(owner, name) in allowed
        require_setting(known, owner, name, f"must be {one_of(allowed)}")


@functools.cache
def _choices(owner: type) -> Mapping[str, tuple[Any, ...]]:
    """The values of each field with a Literal type."""
    hints = get_type_hints(owner).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def require_objects(owner: Any) -> None:
    """Raise SettingError unless each field whose default is an object has one of the field's type,
    or one with all that the protocol asks for which is the type; a class is none.
    """
    section: type = type(owner)
    for name, (kind, default) in _objects(section).items():
        given = getattr(owner, name)
        fits = isinstance(given, kind) and not isinstance(given, type)
        problem = f"must be of type {kind.__name__}, such as {default.__name__}(), or be left out"
        require_setting(fits, owner, name, problem)


@functools.cache
def _objects(owner: type) -> Mapping[str, tuple[type, Any]]:
    """The type of each field whose default is an object, and the default's."""
    hints = get_type_hints(owner)
    return {
        each.name: (hints[each.name], each.default_factory)
        for each in fields(owner)
        if isinstance(each.default_factory, type)
    }


def one_of(words: Iterable[Any]) -> str:
    """The words as a list that ends with "or"."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: Any) -> str:
    """A value as it stands in a message: as Python writes it, or its beginning."""
    try:
        plain = list(value) if isinstance(value, tuple) else value
        large = type(value) is int and abs(value) >= 10**6
        text = f"{value:,}" if large else repr(plain)
    except ValueError:  # A whole number of thousands of digits.
        return "a number with too many digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


class NonFiniteLossError(RuntimeError):
    """A loss or a worker's parameters became nan or infinite.

    The trainers' global parameters still have the values of the last sync.
    """


class OutOfMemoryError(RuntimeError):
    """Memory ran out in a step that could not be repeated with smaller micro-batches.

    Attributes:
        smaller: The largest micro-batch to try next, in samples; 0 if none is left.
    """

    def __init__(self, message: str, smaller: int = 0) -> None:
        super().__init__(message)
        self.smaller = smaller


class OtherRankError(RuntimeError):
    """Another rank of the run failed; the message is that rank's."""


class RankFailureError(OtherRankError):
    """Another rank was killed, is stopped or cannot be reached; a resumed run may succeed."""


RANK_FAILURE = 1
"""Exit code of a command that ends because another rank was killed, stopped or cut off."""


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends so: `RANK_FAILURE`, or 2 for what a user can mend."""
    return RANK_FAILURE if isinstance(error, RankFailureError) else 2


class RunWarning(UserWarning):
    """Something beside a run's training failed, and the run continues without it."""
