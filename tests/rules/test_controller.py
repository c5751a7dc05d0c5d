"""Guards, by hand, and what a controller keeps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import UNKNOWN, NormTest
from adloco.rules.controller import (
    MOST_SAMPLES,
    NORM_FALL,
    NORM_NOISE,
    NORM_WANDER,
    VARIANCE_NOISE,
    VARIANCE_WANDER,
    BatchController,
    BatchGuards,
)
from adloco.rules.level import Level
from adloco.rules.moments import GradientEstimate


def seen(variance: float, norm_sq: float = 1.0) -> GradientEstimate:
    return GradientEstimate(grad_variance=variance, grad_norm_sq=norm_sq, plugin_norm_sq=norm_sq)


def requests(guards: BatchGuards, wanted: list[int]) -> list[int]:
    """The request after each of these answers of a rule."""
    result, current = [], guards.initial
    for samples in wanted:
        current = guards.limit(samples, current)
        result.append(current)
    return result


def test_two_way_by_default() -> None:
    assert requests(BatchGuards(initial=8, max_growth=math.inf), [20, 5, 9]) == [20, 5, 9]


def test_grow_only() -> None:
    assert requests(BatchGuards(initial=8, grow_only=True, max_growth=2), [20, 5, 21]) == [
        16,
        16,
        21,
    ]


def test_maximum_and_minimum() -> None:
    assert requests(
        BatchGuards(initial=8, maximum=30, minimum=6, max_growth=math.inf), [10**12, 2, 29]
    ) == [30, 6, 29]
    assert requests(BatchGuards(initial=8, maximum=8), [9]) == [8]
    assert BatchGuards(maximum=MOST_SAMPLES).maximum == 2**24


def test_growth_per_test() -> None:
    assert requests(BatchGuards(initial=8, max_growth=1.5, maximum=25), [100, 100, 100]) == [
        12,
        18,
        25,
    ]


def test_growth_limit_never_freezes_a_small_request() -> None:
    assert requests(BatchGuards(initial=8, max_growth=1.1, maximum=11), [100] * 4) == [
        9,
        10,
        11,
        11,
    ]
    assert requests(BatchGuards(initial=1, max_growth=1.5), [100] * 3) == [2, 3, 4]
    # A request of other guards, with which a state was loaded, is raised to the minimum at once.
    assert BatchGuards(minimum=6, max_growth=1.5).limit(100, current=2) == 6


def test_hysteresis() -> None:
    # 10% of 100 is 10: 109 and 91 change nothing, 110 and 89 do.
    assert requests(
        BatchGuards(initial=100, maximum=500, hysteresis=0.1), [109, 91, 110, 104, 98]
    ) == [100, 100, 110, 110, 98]


def test_hysteresis_is_of_what_is_wanted() -> None:
    """Of 4 samples 1.3 times as many are 5, which are less than 30% more: the request would stay at
    4 for ever. 5 and 6 more of 20 are 25% and 30%.
    """
    guards = BatchGuards(initial=4, max_growth=1.3, hysteresis=0.3)
    assert requests(guards, [100, 100, 100]) == [5, 6, 7]
    slow = BatchGuards(initial=20, max_growth=1.3, hysteresis=0.3)
    assert requests(slow, [25, 26]) == [20, 26]
    # Within minimum and maximum, 9 to 11 are allowed: a tenth less or more.
    narrow = BatchGuards(initial=10, minimum=9, maximum=11, hysteresis=0.2)
    assert requests(narrow, [1, 99]) == [10, 10]


def test_precise_tests_are_believed() -> None:
    # S = 40 and |G|^2 = 4 from many tests that agree: 10 samples, although those before said 20.
    controller = BatchController(NormTest(eta=1.0), BatchGuards(initial=8, max_growth=math.inf))
    assert controller.estimate is None
    for variance, norm_sq, samples, expected in ((20, 1, 8, 20), (40, 4, 80, 10)):
        many = replace(seen(variance, norm_sq), tests=10_000, variance_spread=1, norm_spread=1e-4)
        controller.update(many, samples)
        estimate = controller.estimate
        assert estimate is not None
        assert estimate.noise_scale == pytest.approx(variance / norm_sq, rel=0.01)
        assert estimate.norm_factor < 1.01
        # Both are known to within a little, and their ratio to within a little more.
        both = math.log(estimate.norm_factor) ** 2 + math.log(estimate.variance_factor) ** 2
        assert estimate.noise_scale_factor == pytest.approx(math.exp(both**0.5))
        assert estimate.noise_scale_factor > estimate.norm_factor > 1
        assert controller.requested_batch in (expected, expected + 1)
    before = controller.estimate
    controller.update(None, 160)
    assert controller.estimate == before


def test_the_request_grows_while_the_gradient_cannot_be_told_from_noise() -> None:
    """Four tests around zero that differ by 0.2 each say nothing of |G|^2, so the batch doubles
    until its noise is small. The published form asks for 1 / eta^2 times the batch at most."""
    noise = GradientEstimate(
        grad_variance=8.0, grad_norm_sq=-0.1, plugin_norm_sq=0.9, tests=4, norm_spread=0.04
    )
    controller = BatchController(NormTest(eta=1.0), BatchGuards(initial=8, max_growth=2))
    requests = []
    for samples in (32, 64, 128):
        controller.update(noise, samples)
        requests.append(controller.requested_batch)
    assert requests == [16, 32, 64]
    assert controller.estimate is not None and controller.estimate.norm_factor > UNKNOWN
    published = BatchController(NormTest(eta=1.0, estimator="plug-in"), BatchGuards(initial=8))
    published.update(noise, 32)
    assert published.requested_batch == math.ceil(8.0 / 0.9)


def test_a_merge_knows_what_both_knew() -> None:
    first, second, untested = (BatchController(NormTest(), BatchGuards()) for _ in range(3))
    first.update(seen(10.0, 1.0), 8)
    second.update(seen(40.0, 1.0), 8)
    first.merge({1: second, 0: first, 2: untested}, {0: 0.25, 1: 0.25, 2: 0.5})
    assert first.measured == seen(10.0, 1.0)
    assert first.estimate is not None and second.estimate is not None
    assert first.estimate.norm_factor > second.estimate.norm_factor * math.exp(0.1)
    # The geometric mean, because logarithms are averaged; each is also raised by half its variance.
    assert first.estimate.grad_variance == pytest.approx(
        2 * second.estimate.grad_variance / 4, rel=1e-6
    )
    untested.merge({0: untested, 1: second}, {0: 0.5, 1: 0.5})
    assert untested.estimate is not None
    assert untested.estimate.grad_variance == pytest.approx(second.estimate.grad_variance)


def test_state_survives() -> None:
    first = BatchController(NormTest(), BatchGuards())
    fresh = BatchController(NormTest(), BatchGuards())
    fresh.load_state_dict(first.state_dict())
    assert fresh.estimate is None
    first.update(seen(30, 0.7), 8)
    second = BatchController(NormTest(), BatchGuards())
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(seen(50, 0.3), 24)
    assert (second.requested_batch, second.estimate) == (first.requested_batch, first.estimate)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": 0}, "^initial must be > 0, got 0"),
        ({"initial": 8, "maximum": 4}, "^maximum must be >= initial = 8, got 4"),
        ({"initial": 8, "minimum": 0}, "^minimum must be > 0 and <= initial = 8, got 0"),
        ({"initial": 8, "minimum": 9}, "^minimum must be > 0 and <= initial = 8, got 9"),
        ({"max_growth": 1.0}, "^max_growth must be > 1"),
        ({"hysteresis": 1.1}, r"^hysteresis must be in \[0, 1\], got 1.1"),
        ({"hysteresis": -0.1}, "^hysteresis must be in"),
    ],
)
def test_refusals(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchGuards(**settings)  # type: ignore[arg-type]


def test_levels_change_between_tests_and_are_kept() -> None:
    test = replace(seen(4.0, 2.0), variance_spread=3.0, norm_spread=1.0, tests=4, inner_variance=5)
    one, other = (BatchController(NormTest(), BatchGuards()) for _ in range(2))
    norm = Level(log_mean=None, log_variance=0.0, test_variance=NORM_NOISE)
    variance = Level(log_mean=None, log_variance=0.0, test_variance=VARIANCE_NOISE)
    for samples, found in ((8, 4.0), (16, 6.0)):
        one.update(replace(test, grad_variance=found), samples)
        norm = norm.later(math.log(2), wander=NORM_WANDER, fall=NORM_FALL)
        norm = norm.seen(2.0, scale=2.0, spread=1.0, tests=4)
        variance = variance.later(math.log(2), wander=VARIANCE_WANDER)
        variance = variance.seen_positive(found, spread=3.0, tests=4)
    other.load_state_dict(one.state_dict())
    estimate = other.estimate
    assert estimate is not None
    assert estimate.grad_norm_sq == pytest.approx(norm.value)
    assert estimate.norm_factor == pytest.approx(norm.factor)
    assert estimate.grad_variance == pytest.approx(variance.value)
    assert estimate.variance_factor == pytest.approx(variance.factor)
    # The ratios of plug-in forms are those of the last tests: S / |gbar|^2, and Var / |gbar|^4.
    assert estimate.grad_variance / estimate.plugin_norm_sq == pytest.approx(6 / 2)
    assert estimate.inner_variance / estimate.plugin_norm_sq**2 == pytest.approx(5 / 2**2)


def test_tests_without_noise_ask_for_the_smallest_batch() -> None:
    controller = BatchController(NormTest(estimator="plug-in"), BatchGuards(initial=8))
    controller.update(seen(0.0), 8)
    assert controller.requested_batch == 1
    assert controller.estimate is not None and controller.estimate.plugin_norm_sq == 1.0


@pytest.mark.parametrize(("groups", "asked"), [(1, 3), (2, 1)])
def test_what_a_rule_is_told(groups: int, asked: int) -> None:
    """One of a schedule is asked before the first round and after each, others after tests."""
    told = []

    class Rule(NormTest):
        fewest_groups = groups

        def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
            told.append((estimate is not None, point))
            return point.requested_batch + 1

    controller = BatchController(Rule(), BatchGuards(initial=8))
    controller.update(None, 32, decay=0.5)
    controller.update(seen(4.0), 64, decay=0.25)
    points = [
        (False, TrainingPoint(samples=0, requested_batch=8, initial_batch=8, decay=1.0)),
        (False, TrainingPoint(samples=32, requested_batch=9, initial_batch=8, decay=0.5)),
        (True, TrainingPoint(samples=64, requested_batch=10, initial_batch=8, decay=0.25)),
    ]
    if groups == 2:
        points = [(True, replace(points[2][1], requested_batch=8))]
    assert told == points
    assert controller.requested_batch == 8 + asked


@pytest.mark.parametrize("answer", [8.0, math.nan, None, "8"])
def test_a_rule_requests_whole_numbers(answer: object) -> None:
    class Rule(ConstantBatch):
        def requested(self, *told: object) -> int:
            return answer  # type: ignore[return-value]

    with pytest.raises(ValueError, match=f"a whole number of samples, got {answer!r} from Rule"):
        BatchController(Rule(), BatchGuards())


def test_a_whole_number_of_numpy_becomes_one_of_python() -> None:
    class Rule(ConstantBatch):
        def requested(self, *told: object) -> int:
            return np.int64(5)  # type: ignore[return-value]

    assert type(BatchController(Rule(), BatchGuards()).requested_batch) is int
