"""The filter of a level, against closed forms and on the course that |G|^2 takes in a short run."""

import math
import random
import statistics

import pytest

from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.controller import NORM_NOISE, BatchController, BatchGuards
from adloco.rules.level import PAST_TESTS, VAGUE, Level, merged
from adloco.rules.moments import GradientEstimate

UNSEEN = Level(log_mean=None, log_variance=0.0, test_variance=0.01)


def test_precise_tests_are_a_kalman_filter_of_the_logarithm() -> None:
    """With errors of a few percent the logarithm of a measurement is normal with the variance of
    its relative error: r = 0.01 / 4. Prior 9 around log 2: nearly the measurement. Then 0.02 are
    added, and the gain of the second measurement is p / (p + r)."""
    first = UNSEEN.seen(2.0, scale=2.0, spread=0.04, tests=4)
    assert first.test_variance == pytest.approx(0.01)  # The spread is what was expected.
    assert first.value == pytest.approx(2.0, rel=0.005)
    assert first.log_variance == pytest.approx(0.01 / 4, rel=0.02)
    second = first.later(0.2, wander=0.1).seen(2.1, scale=2.1, spread=0.0441, tests=4)
    prior, own = first.log_variance + 0.02, 0.01 / 4
    gain = prior / (prior + own)
    expected = math.log(2) + gain * math.log(1.05)
    assert second.log_mean == pytest.approx(expected, abs=0.01)
    assert second.log_variance == pytest.approx(prior * (1 - gain), rel=0.1)


def test_a_negative_measurement_lowers_the_level_and_leaves_it_positive() -> None:
    level = Level(log_mean=0.0, log_variance=1.0, test_variance=1.0)
    lower = level.seen(-1.0, scale=1.0, spread=1.0, tests=4)
    assert 0 < lower.value < 1
    # By a plain sum over e^x: weights exp(-x^2 / 2 - ((-1 - e^x) / 0.5)^2 / 2).
    points = [k / 1000 for k in range(-8000, 4000)]
    weights = [math.exp(-(x**2) / 2 - ((-1 - math.exp(x)) / 0.5) ** 2 / 2) for x in points]
    mean = sum(w * x for w, x in zip(weights, points, strict=True)) / sum(weights)
    assert lower.log_mean == pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize("errors", [1.5, 2.5, 3.0, 3.5, 5.0, 8.0])
def test_a_first_measurement_of_some_standard_errors_by_a_plain_sum(errors: float) -> None:
    """The left tail is long: at three of them its last percent reaches to a thousandth."""
    noise = 1 / errors**2
    found = Level(log_mean=None, log_variance=0.0, test_variance=noise).seen(
        1.0, scale=1.0, spread=0.0, tests=1
    )
    error = math.sqrt(found.test_variance)
    mean = math.log(max(1.0, error))
    points = [k / 1000 for k in range(-30000, 5000)]
    weights = [
        math.exp(-((x - mean) ** 2) / (2 * VAGUE) - ((1.0 - math.exp(x)) / error) ** 2 / 2)
        for x in points
    ]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, points, strict=True)) / total
    assert found.log_mean == pytest.approx(middle, abs=2e-3)
    assert found.log_variance == pytest.approx(spread, rel=2e-3)


def test_a_measurement_far_below_is_found() -> None:
    level = Level(log_mean=math.log(300.0), log_variance=0.01, test_variance=0.01)
    fallen = level.later(1.0, wander=3.0).seen(1.0, scale=1.0, spread=0.01, tests=4)
    assert fallen.value == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("deviation", [0.05, 0.1, 0.3])
def test_a_measurement_below_all_of_the_first_grid_by_a_plain_sum(deviation: float) -> None:
    """-0.02, where the level was known to be 1, so that the product has its weight between."""
    level = Level(log_mean=0.0, log_variance=deviation**2, test_variance=1e-6)
    fallen = level.seen(-0.02, scale=1.0, spread=0.01, tests=4)
    error = math.sqrt(fallen.test_variance / 4)
    points = [k / 10_000 for k in range(-80_000, 10_000)]
    logs = [-((x / deviation) ** 2) / 2 - ((-0.02 - math.exp(x)) / error) ** 2 / 2 for x in points]
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, points, strict=True)) / total
    assert middle < -6 * deviation
    assert fallen.log_mean == pytest.approx(middle, abs=2e-3)
    assert fallen.log_variance == pytest.approx(spread, rel=2e-3)


def test_the_noise_of_a_test_follows_the_spread() -> None:
    level = UNSEEN.seen(1.0, scale=2.0, spread=4.0, tests=5)
    assert level.test_variance == pytest.approx((4 * 1 + PAST_TESTS * 0.01) / (4 + PAST_TESTS))


def test_a_single_test_s_noise_is_what_surprises() -> None:
    """It is 2 from a level of 1 that may itself be wrong by 0.1 = e^v - 1 of its square."""
    level = Level(log_mean=0.0, log_variance=math.log(1.1), test_variance=0.01)
    alone = level.seen(3.0, scale=2.0, spread=0.0, tests=1)
    assert alone.test_variance == pytest.approx(
        ((4 - 0.1) / 4 + PAST_TESTS * 0.01) / (1 + PAST_TESTS)
    )
    expected = level.seen(1.01, scale=2.0, spread=0.0, tests=1)
    assert expected.test_variance == pytest.approx(0.01 * PAST_TESTS / (1 + PAST_TESTS))


def test_what_has_no_noise() -> None:
    exact = UNSEEN.seen(0.0, scale=0.0, spread=0.0, tests=1)
    assert (exact.value, exact.factor) == (0.0, 1.0)
    assert exact.later(1.0, wander=1.0).seen(2.0, scale=2.0, spread=0.0, tests=4).value > 1
    assert UNSEEN.later(1.0, wander=1.0) == UNSEEN
    # A measurement of one's own may give |G|^2 alone.
    given = UNSEEN.seen(2.0, scale=0.0, spread=0.0, tests=1)
    assert (given.value, given.factor) == (pytest.approx(2.0), 1.0)


def test_a_merge_has_the_mean_of_the_logarithms_and_the_variance_of_the_mixture() -> None:
    levels = {
        0: Level(log_mean=0.0, log_variance=0.2, test_variance=0.1),
        1: Level(log_mean=1.0, log_variance=0.4, test_variance=0.3),
        2: UNSEEN,
    }
    result = merged(levels, {0: 0.3, 1: 0.3, 2: 0.4}, added=1.0)
    # Shares 1/2 and 1/2: mean 0.5, within 0.3, between 0.25.
    assert result == Level(
        log_mean=0.5,
        log_variance=pytest.approx(0.3 + 0.25 + 1.0),
        test_variance=pytest.approx(0.2),
    )


@pytest.mark.parametrize(
    ("rounds", "goal"),
    [(20, 0.6), (60, 0.75), pytest.param(300, 0.95, marks=pytest.mark.nightly)],
)
def test_the_beginning_of_a_run_is_forgotten(rounds: int, goal: float) -> None:
    """|G|^2 falls 300-fold within a tenth of the run, then 4-fold; S = 4, and a round has eight
    tests of 8 samples, each of 64 in all that are trained on.

    The share of rounds after the first tenth in which a controller's |G|^2 is within 1.5 times of
    the truth, over 20 courses. The arithmetic average of before, with a weight of 0.8 on the past,
    sees the same tests.
    """
    close, average_close, ratios = [], [], []
    for seed in range(20):
        draw = random.Random(seed)
        controller = BatchController(NormTest(), BatchGuards())
        average = weight = 0.0
        for index in range(1, rounds + 1):
            part = index / rounds
            early = math.log(300) * min(1.0, part / 0.1)
            late = math.log(4) * max(0.0, (part - 0.1) / 0.9)
            truth = 30 * math.exp(-early - late)
            tests = [truth + draw.gauss(0, (truth + 4 / 8) * NORM_NOISE**0.5) for _ in range(8)]
            mean = statistics.fmean(tests)
            measured = GradientEstimate(
                grad_variance=4.0,
                grad_norm_sq=mean,
                plugin_norm_sq=mean + 4 / 8,
                tests=8,
                norm_spread=statistics.variance(tests),
            )
            controller.update(measured, 64 * index)
            weight, average = 0.8 * weight + 1, 0.8 * average + mean
            if part > 0.1:
                assert controller.estimate is not None
                ratios.append(controller.estimate.grad_norm_sq / truth)
                close.append(1 / 1.5 < ratios[-1] < 1.5)
                average_close.append(1 / 1.5 < average / weight / truth < 1.5)
    assert statistics.fmean(close) > goal
    assert statistics.fmean(average_close) < goal
    assert 0.8 < statistics.median(ratios) < 1.25


def test_a_merge_leaves_out_what_is_exactly_zero() -> None:
    zero = UNSEEN.seen(0.0, scale=0.0, spread=0.0, tests=1)
    known = Level(log_mean=1.0, log_variance=0.2, test_variance=0.1)
    result = merged({0: zero, 1: known}, {0: 0.5, 1: 0.5}, added=1.0)
    assert (result.log_mean, result.log_variance) == (1.0, pytest.approx(1.2))


def test_a_mean_of_squares_is_a_kalman_filter_of_the_logarithm() -> None:
    """Four tests with a relative variance of 0.5 each, whose spread is what was expected."""
    own = math.log1p(0.5 / 4)
    unseen = Level(log_mean=None, log_variance=0.0, test_variance=0.5)
    first = unseen.seen_positive(2.0, spread=0.5 * 2.0**2, tests=4)
    assert (first.log_mean, first.log_variance) == pytest.approx((math.log(2) + own / 2, own))
    zero = unseen.seen_positive(0.0, spread=0.0, tests=1)
    assert (zero.value, zero.seen_positive(2.0, spread=2.0, tests=4)) == (0.0, first)
    second = first.later(1.0, wander=0.3).seen_positive(4.0, spread=0.5 * 4.0**2, tests=4)
    prior, found = own + 0.3, math.log(4) + own / 2
    expected = first.log_mean + prior / (prior + own) * (found - first.log_mean)
    assert (second.log_mean, second.log_variance) == pytest.approx(
        (expected, prior * own / (prior + own))
    )
