"""What the law of the gap says at a few places; `tests/test_gap.py` holds it to its runs."""

import math

import numpy as np
import pytest

from adloco.plan.gap_law import (
    CONSTANTS,
    COVARIANCE,
    NORMAL_90,
    SLOPE,
    SLOPE_DEVIATION,
    Gap,
    gap,
)


def test_what_the_law_says() -> None:
    """By hand, with four million parameters, four workers and 248 syncs; the interval by drawing
    constants.
    """
    scale, by_workers, by_syncs, by_size, floor = CONSTANTS
    found = gap(4e6, 4, 248)
    falling = math.exp(scale) * 4**by_size * 248**by_syncs
    assert found.expected == pytest.approx(3**by_workers * (falling + floor))
    drawn = np.random.default_rng(0).multivariate_normal(CONSTANTS, COVARIANCE, 20_000)
    scales, workers, syncs, sizes, floors = drawn.T
    for count, rel in ((248.0, 0.1), (100_000.0, 0.03)):  # In the end the rest is left.
        gaps = 3**workers * (np.exp(scales) * 4**sizes * count**syncs + floors)
        assert gap(4e6, 4, count).deviation == pytest.approx(gaps.std(), rel=rel)
    assert gap(4e6, 4, 0.1) == gap(4e6, 4, 1) and gap(4e6, 4, 1).expected > 2 * found.expected
    assert gap(4e6, 4, 2).expected < 0.6 * gap(4e6, 4, 1).expected
    larger = gap(23_863_808, 4, 117)
    assert abs(larger.expected - 0.043) < NORMAL_90 * larger.deviation, "that of its run"


def test_one_worker_is_not_behind() -> None:
    assert gap(1e6, 1, 1) == gap(1e9, 1, 1e4) == Gap(0.0, 0.0)
    assert Gap(0.0, 0.0).times_tokens(NORMAL_90) == 1.0


def test_tokens_fall_along_the_slope() -> None:
    assert Gap(SLOPE * math.log(2), 0.001).times_tokens() == pytest.approx(2)
    assert Gap(0.0, 0.001).times_tokens(-1) == 1.0
    assert math.isfinite(Gap(1e9, 0.0).times_tokens())


def test_the_interval_of_the_tokens_has_that_of_the_gap_and_of_the_slope() -> None:
    """By drawing both."""
    drawn = np.random.default_rng(0)
    gaps = drawn.normal(0.02, 0.004, 100_000)
    slopes = SLOPE * np.exp(drawn.normal(0, SLOPE_DEVIATION, 100_000))
    for deviations, part in ((-NORMAL_90, 0.05), (NORMAL_90, 0.95)):
        expected = np.quantile(gaps / slopes, part)
        found = math.log(Gap(0.02, 0.004).times_tokens(deviations))
        assert found == pytest.approx(expected, rel=0.1)
    lowest, highest = SLOPE * np.exp(np.array([-1, 1]) * NORMAL_90 * SLOPE_DEVIATION)
    assert lowest == pytest.approx(0.05, abs=0.002) and highest == pytest.approx(0.094, abs=0.003)
