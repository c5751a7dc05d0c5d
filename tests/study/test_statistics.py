"""Means, intervals and crossings against hand arithmetic."""

import math

import pytest

from adloco.study.statistics import Spread, first_crossing, paired_difference


def test_a_spread_leaves_out_what_is_not_known() -> None:
    assert Spread.of([3.0, None, 1.0]) == Spread(mean=2.0, lowest=1.0, highest=3.0, count=2)
    assert Spread.of([None]) == Spread(mean=None, lowest=None, highest=None, count=0)


def test_the_interval_of_three_pairs() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t = 4.303 for two degrees of freedom.
    Seed 9 has no partner.
    """
    values = {"a": {0: 1.1, 1: 2.2, 2: 3.3}, "b": {0: 1.0, 1: 2.0, 2: 3.0, 9: 7.0}}
    found = paired_difference("a", "b", values)
    assert found is not None and found.seeds == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert not found.clear
    smaller = paired_difference("b", "a", {"a": {0: 1.0, 1: 1.01}, "b": {0: 0.5, 1: 0.51}})
    assert smaller is not None and smaller.mean == pytest.approx(-0.5) and smaller.clear


def test_one_seed_says_nothing_of_the_spread() -> None:
    found = paired_difference("a", "b", {"a": {0: 1.0}, "b": {0: 2.0}})
    assert found is not None and found.half_width is None and not found.clear
    assert paired_difference("a", "b", {"a": {0: 1.0}, "b": {1: 2.0}}) is None


def test_a_crossing_is_on_the_line_between_points() -> None:
    """From 3 at 100 to 1 at 300, a loss of 2.5 is a quarter of the way: 150."""
    x, y = [50, 100, 200, 300], [4.0, 3.0, None, 1.0]
    assert first_crossing(x, y, 2.5) == 150
    assert first_crossing(x, y, 4.0) == 50
    assert first_crossing(x, y, 1.0) == 300
    assert first_crossing(x, y, 0.9) is None
    assert first_crossing(x, y, 4.5) is None, "it was there before anybody looked"
    assert first_crossing([1, 2, 3], [2.0, 1.0, 3.0], 1.5) == 1.5, "the first time counts"


def test_the_interval_of_more_pairs_than_the_table_has() -> None:
    """41 differences of 0 and 1 in turn: t = 2.021 for 40 degrees of freedom."""
    values = {
        "a": {seed: float(seed % 2) for seed in range(41)},
        "b": dict.fromkeys(range(41), 0.0),
    }
    found = paired_difference("a", "b", values)
    assert found is not None and found.half_width is not None
    deviation = math.sqrt(20 * 21 / 41 / 40)
    assert found.half_width == pytest.approx(2.021 * deviation / math.sqrt(41), rel=1e-3)
