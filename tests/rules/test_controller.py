"""Guards and smoothing, by hand."""

import pytest

from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.moments import GradientEstimate


def seen(variance: float, norm_sq: float = 1.0) -> GradientEstimate:
    return GradientEstimate(grad_variance=variance, grad_norm_sq=norm_sq, plugin_norm_sq=norm_sq)


def requests(guards: BatchGuards, variances: list[float]) -> list[int]:
    controller = BatchController(NormTest(eta=1.0), guards)
    result = []
    for variance in variances:
        controller.update(seen(variance), 0)
        result.append(controller.requested_batch)
    return result


def test_two_way_by_default() -> None:
    assert requests(BatchGuards(initial=8), [20, 5, 9]) == [20, 5, 9]


def test_grow_only() -> None:
    assert requests(BatchGuards(initial=8, grow_only=True), [20, 5, 21]) == [20, 20, 21]


def test_maximum_and_minimum() -> None:
    assert requests(BatchGuards(initial=8, maximum=30, minimum=6), [1e12, 2, 29]) == [30, 6, 29]


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


def test_hysteresis() -> None:
    # 10% of 100 is 10: 109 and 91 change nothing, 110 and 89 do.
    assert requests(
        BatchGuards(initial=100, maximum=500, hysteresis=0.1), [109, 91, 110, 104, 98]
    ) == [100, 100, 110, 110, 98]


def test_smoothing_averages_variance_and_norm_separately() -> None:
    # Weights 0.5 and 1: S = (0.5*10 + 40)/1.5 = 30, |G|^2 = (0.5*1 + 4)/1.5 = 3: 10 samples. (The
    # mean of the ratios would be 10 too late.)
    controller = BatchController(NormTest(eta=1.0), BatchGuards(initial=8, smoothing=0.5))
    controller.update(seen(10, 1), 0)
    assert controller.requested_batch == 10
    controller.update(seen(40, 4), 0)
    assert controller.estimate == seen(30, 3)
    assert controller.requested_batch == 10
    controller.update(None, 0)
    assert controller.estimate == seen(30, 3)


def test_state_survives() -> None:
    first = BatchController(NormTest(), BatchGuards(smoothing=0.9))
    first.update(seen(30, 0.7), 0)
    second = BatchController(NormTest(), BatchGuards(smoothing=0.9))
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(seen(50, 0.3), 0)
    assert (second.requested_batch, second.estimate) == (first.requested_batch, first.estimate)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": 0}, "^initial must be > 0, got 0"),
        ({"initial": 8, "maximum": 4}, "^maximum must be >= initial = 8, got 4"),
        ({"initial": 8, "minimum": 9}, "^minimum must be > 0 and <= initial = 8, got 9"),
        ({"max_growth": 1.0}, "^max_growth must be > 1"),
        (
            {"hysteresis": 0.6, "max_growth": 1.5},
            "^hysteresis must be >= 0 and <= max_growth - 1 = 0.5, got 0.6",
        ),
        ({"hysteresis": -0.1}, "^hysteresis must be >= 0"),
        ({"smoothing": 1.0}, r"^smoothing must be in \[0, 1\)"),
    ],
)
def test_refusals(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchGuards(**settings)  # type: ignore[arg-type]
