"""Means, intervals and crossings against hand arithmetic."""

import math
import statistics

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
    same = paired_difference("a", "b", {"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 1: 2.0}})
    assert same is not None and (same.mean, same.half_width, same.clear) == (0.0, 0.0, False)


@pytest.mark.parametrize("freedom", [*range(1, 24), 40])
def test_the_interval_has_95_percent(freedom: int) -> None:
    """Student's density is proportional to cos(a)^(n - 1) da where t = sqrt(n) tan(a). Differences
    of 0 and 1 in turn tell the quantile that was taken.
    """
    seeds = range(freedom + 1)
    values = {"a": {seed: float(seed % 2) for seed in seeds}, "b": dict.fromkeys(seeds, 0.0)}
    found = paired_difference("a", "b", values)
    assert found is not None and found.half_width is not None
    deviation = statistics.stdev(values["a"].values()) / math.sqrt(len(seeds))
    end = math.atan(found.half_width / deviation / math.sqrt(freedom))
    places = [(place + 0.5) / 2000 for place in range(2000)]
    inside = math.fsum(math.cos(end * place) ** (freedom - 1) for place in places) * end / 2000
    half = math.sqrt(math.pi) / 2 * math.gamma(freedom / 2) / math.gamma((freedom + 1) / 2)
    assert inside / half == pytest.approx(0.95, abs=2e-4)


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
