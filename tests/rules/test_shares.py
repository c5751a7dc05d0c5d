"""Shares by speed, by hand."""

import pytest

from adloco.rules.shares import EqualShares, SpeedShares, proportional


def test_proportional_by_hand() -> None:
    # 20 in proportion 3 : 1 : 1 is 12, 4, 4.
    assert proportional(20, [3.0, 1.0, 1.0], minimum=1) == [12, 4, 4]
    # 10 in 1 : 1 : 1 leaves one, for the first.
    assert proportional(10, [1.0, 1.0, 1.0], minimum=1) == [4, 3, 3]
    # The slow one would get 10/101 < 2: it gets 2, the others what is left.
    assert proportional(10, [100.0, 1.0], minimum=2) == [8, 2]
    assert proportional(4, [100.0, 1.0], minimum=2) == [2, 2]


@pytest.mark.parametrize("total", [6, 7, 29, 100])
@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [5.0, 5.0, 0.1], [1e-9, 1.0, 1e9]])
def test_proportional_is_exact(total: int, weights: list[float]) -> None:
    shares = proportional(total, weights, minimum=2)
    assert sum(shares) == total
    assert min(shares) >= 2
    assert [share for _, share in sorted(zip(weights, shares, strict=True))] == sorted(shares)


def test_equal_shares() -> None:
    assert EqualShares().split(17, [0, 1, 2, 3], {0: 5.0}, minimum=1) == [5, 4, 4, 4]
    assert EqualShares().split(3, [0, 1, 2, 3], {}, minimum=1) == [1, 1, 1, 1]
    assert EqualShares().split(3, [0, 1, 2, 3], {}, minimum=2) == [2, 2, 2, 2]


def test_speeds_are_bounded_and_smoothed() -> None:
    rule = SpeedShares(smoothing=0.5, limit=4.0)
    assert rule.split(16, [3, 5], {}, minimum=1) == [8, 8]
    assert rule.split(16, [3, 5], {3: 30.0, 5: 10.0}, minimum=1) == [12, 4]
    # Median 10: a worker that is 1000 times slower counts as 4 times slower; one not measured yet counts as the median.
    assert rule.split(27, [0, 1, 2, 3], {0: 10.0, 1: 10.0, 2: 0.01}, minimum=1) == [9, 8, 2, 8]
    assert rule.update({}, {0: 10.0}) == {0: 10.0}
    assert rule.update({0: 10.0}, {0: 20.0}) == {0: 15.0}


@pytest.mark.parametrize(("settings", "message"), [({"smoothing": 1.0}, "placement.smoothing must be"), ({"limit": 0.5}, "placement.limit must be")])
def test_refusals(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeedShares(**settings)
