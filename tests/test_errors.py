"""Sentences about settings, with names as in a class and as in a recipe."""

import math
import pickle
from dataclasses import dataclass
from typing import Literal

import pytest

from adloco.errors import (
    SettingError,
    require_choices,
    require_range,
    require_setting,
    shown,
)


@dataclass(frozen=True)
class Sizes:
    first: float = 1
    last: float = 8
    order: Literal["rising", "falling"] = "rising"
    word: str = "{last}"


def test_names_as_in_the_class_and_as_in_a_recipe() -> None:
    error = SettingError(Sizes(), "first", "must be <= {last=}, and {order} rising, got {9: 9}")
    assert str(error) == "first must be <= last = 8, and order rising, got {9: 9}"
    assert error.named("s") == "s.first must be <= s.last = 8, and s.order rising, got {9: 9}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"above": 1}, "first must be > 1, got 1"),
        ({"at_least": 2}, "first must be >= 2, got 1"),
        ({"below": 1}, "first must be < 1, got 1"),
        ({"at_most": 0.5}, "first must be <= 0.5, got 1"),
        ({"above": 1, "at_most": 2}, "first must be in (1, 2], got 1"),
        ({"at_least": 0, "below": 1}, "first must be in [0, 1), got 1"),
    ],
)
def test_ranges(bounds: dict[str, float], message: str) -> None:
    require_range(Sizes(), "first", "last", at_least=1, at_most=8)
    with pytest.raises(SettingError) as caught:
        require_range(Sizes(), "first", **bounds)
    assert str(caught.value) == message


@pytest.mark.parametrize("bound", ["above", "at_least", "below", "at_most"])
def test_nan_is_in_no_range(bound: str) -> None:
    with pytest.raises(SettingError, match="got nan"):
        require_range(Sizes(first=math.nan), "first", **{bound: 0.0})


def test_choices_and_conditions() -> None:
    require_choices(Sizes())
    with pytest.raises(SettingError, match="^order must be rising or falling, got 'flat'$"):
        require_choices(Sizes(order="flat"))  # type: ignore[arg-type]
    require_setting(True, Sizes(), "first", "must be odd")
    with pytest.raises(SettingError, match="^first must be even, got 1$"):
        require_setting(False, Sizes(), "first", "must be even")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1000, "1000"),
        (-12345678, "-12,345,678"),
        (1e30, "1e+30"),
        ("x", "'x'"),
        ((1, "a"), "[1, 'a']"),
        ("x" * 500, "'" + "x" * 199 + "..."),
    ],
)
def test_values_in_messages(value: object, text: str) -> None:
    assert shown(value) == text
    assert shown(10**5000) == "a number with too many digits"
