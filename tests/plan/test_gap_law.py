"""What the law of the gap says at a few places; `tests/test_gap.py` holds it to its runs."""

import math

import numpy as np
import pytest

from adloco.plan.gap_law import CONSTANTS, COVARIANCE, SLOPE, gap, times_tokens


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
    gaps = 3**workers * (np.exp(scales) * 4**sizes * 248**syncs + floors)
    lowest, highest = np.quantile(gaps, (0.05, 0.95))
    assert found.least == pytest.approx(lowest, rel=0.1)
    assert found.most == pytest.approx(highest, rel=0.1)
    larger = gap(23_863_808, 4, 117)
    assert larger.least < 0.043 < larger.most, "that of its run"


def test_one_worker_is_not_behind() -> None:
    assert gap(1e6, 1, 1) == gap(1e9, 1, 1e4)
    assert gap(1e6, 1, 1).most == 0.0
    assert times_tokens(0.0) == 1.0


def test_tokens_fall_along_the_slope() -> None:
    assert times_tokens(SLOPE * math.log(2)) == pytest.approx(2)
    assert math.isfinite(times_tokens(1e9))
