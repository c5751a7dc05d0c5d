"""What the law of the gap says at a few places; `tests/test_gap.py` holds it to its runs."""

import math

import pytest

from adloco.plan.gap_law import CONSTANTS, COVARIANCE, SLOPE, gap, times_tokens


def test_what_the_law_says() -> None:
    """By hand, at the place of 0.13M parameters, 20 tokens each, four workers and 248 syncs."""
    place = (1.0, *map(math.log, (133_440, 20, 4, 248)))
    log = sum(constant * each for constant, each in zip(CONSTANTS, place, strict=True))
    variance = sum(
        one * other * value
        for one, row in zip(place, COVARIANCE, strict=True)
        for other, value in zip(place, row, strict=True)
    )
    found = gap(133_440, 20 * 133_440, 4, 248)
    assert found.expected == pytest.approx(math.exp(log))
    assert found.most == pytest.approx(math.exp(log + 1.645 * math.sqrt(variance)))
    larger = gap(23_863_808, 40_000_512, 4, 117)
    assert larger.least < 0.043 < larger.most  # That of its run.


def test_one_worker_is_not_behind() -> None:
    assert gap(1e6, 1e7, 1, 1) == gap(1e9, 1e10, 1, 1e4)
    assert gap(1e6, 1e7, 1, 1).most == 0.0
    assert times_tokens(0.0) == 1.0


def test_tokens_fall_along_the_slope() -> None:
    assert times_tokens(SLOPE * math.log(2)) == pytest.approx(2)
    assert math.isfinite(times_tokens(1e9))
