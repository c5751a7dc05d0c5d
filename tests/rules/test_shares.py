"""Shares by speed, by hand."""

import pytest

from adloco.rules.shares import EqualShares, Shares, SpeedShares, proportional


def split(
    rule: Shares,
    total: int,
    workers: list[int],
    speeds: dict[int, float],
    minimum: int,
    maximum: int | None,
) -> list[int]:
    return proportional(total, rule.weights(workers, speeds), minimum=minimum, maximum=maximum)


def test_proportional_by_hand() -> None:
    # 20 in proportion 3 : 1 : 1 is 12, 4, 4.
    assert proportional(20, [3.0, 1.0, 1.0], minimum=1, maximum=None) == [12, 4, 4]
    # 10 in 1 : 1 : 1 leaves one, for the first.
    assert proportional(10, [1.0, 1.0, 1.0], minimum=1, maximum=None) == [4, 3, 3]
    # The slow one would get 10/101 < 2: it gets 2, the others what is left.
    assert proportional(10, [100.0, 1.0], minimum=2, maximum=None) == [8, 2]
    assert proportional(4, [100.0, 1.0], minimum=2, maximum=None) == [2, 2]


@pytest.mark.parametrize("total", [6, 7, 29, 100])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [5.0, 5.0, 0.1], [1e-9, 1.0, 1e9]])
def test_proportional_is_exact(total: int, weights: list[float]) -> None:
    shares = proportional(total, weights, minimum=2, maximum=None)
    assert sum(shares) == total
    assert min(shares) >= 2
    assert [share for _, share in sorted(zip(weights, shares, strict=True))] == sorted(shares)


def test_equal_shares() -> None:
    assert split(EqualShares(), 17, [0, 1, 2, 3], {0: 5.0}, minimum=1, maximum=None) == [5, 4, 4, 4]
    assert split(EqualShares(), 3, [0, 1, 2, 3], {}, minimum=1, maximum=None) == [1, 1, 1, 1]
    assert split(EqualShares(), 3, [0, 1, 2, 3], {}, minimum=2, maximum=None) == [2, 2, 2, 2]


def test_speeds_are_bounded_and_smoothed() -> None:
    rule = SpeedShares()
    assert split(rule, 16, [3, 5], {}, minimum=1, maximum=None) == [8, 8]
    assert split(rule, 16, [3, 5], {3: 30.0, 5: 10.0}, minimum=1, maximum=None) == [12, 4]
    assert rule.weights([0, 1], {0: 1.0, 1: 10.0}) == [5.5 / 4, 10.0], "the median of two: 5.5"
    # Median 10: a worker that is 1000 times slower counts as 4 times slower; one not measured yet
    # counts as the median.
    assert split(rule, 27, [0, 1, 2, 3], {0: 10.0, 1: 10.0, 2: 0.01}, minimum=1, maximum=None) == [
        9,
        8,
        2,
        8,
    ]
    assert rule.update({}, {0: 10.0}) == {0: 10.0}
    assert rule.update({0: 10.0}, {0: 20.0}) == {0: 15.0}


def test_no_share_exceeds_what_fits() -> None:
    """The rest goes to the other workers, in proportion to their speeds; the total stays."""
    speeds = {0: 30.0, 1: 10.0, 2: 10.0}
    rule = SpeedShares()
    # 20 in 3 : 1 : 1 is 12, 4, 4. At most 8 each: 12 are left for the others.
    assert split(rule, 20, [0, 1, 2], speeds, minimum=1, maximum=None) == [12, 4, 4]
    assert split(rule, 20, [0, 1, 2], speeds, minimum=1, maximum=8) == [8, 6, 6]
    # Speeds of 4 : 3 : 1: 20 is 10, 7.5, 2.5. At most 8: then 12 in 3 : 1 is 9 and 3, one too many.
    speeds = {0: 40.0, 1: 30.0, 2: 10.0}
    assert split(rule, 20, [0, 1, 2], speeds, minimum=1, maximum=8) == [8, 8, 4]
    # All that fits.
    assert split(rule, 24, [0, 1, 2], speeds, minimum=1, maximum=8) == [8, 8, 8]
    # The minimum of the slow one is kept: 10 in 8 : 1 : 1 with at least 2 and at most 5.
    assert split(rule, 10, [0, 1, 2], {0: 80, 1: 20, 2: 20}, minimum=2, maximum=5) == [5, 3, 2]


@pytest.mark.parametrize("total", [6, 7, 17, 29, 30])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [5.0, 5.0, 0.1], [1e-9, 1.0, 1e9]])
def test_capped_shares_are_exact_and_in_order(total: int, weights: list[float]) -> None:
    shares = proportional(total, weights, minimum=2, maximum=10)
    assert sum(shares) == total
    assert 2 <= min(shares) <= max(shares) <= 10
    assert [share for _, share in sorted(zip(weights, shares, strict=True))] == sorted(shares)
