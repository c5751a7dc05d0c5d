"""Learning-rate schedules at their corners."""

from dataclasses import replace

import pytest

from adloco.rules.learning_rate import LearningRate


def test_cosine() -> None:
    rate = LearningRate(shape="cosine", total_tokens=1000, warmup_fraction=0.2, final_fraction=0.1)
    assert [rate.factor(tokens, 1) for tokens in (0, 100, 200)] == [0, 0.5, 1]
    assert rate.factor(600, 1) == pytest.approx(0.55)  # Half-way: the mean of 1 and 0.1.
    assert rate.factor(1000, 1) == pytest.approx(0.1)
    assert rate.factor(5000, 1) == pytest.approx(0.1)


def test_wsd() -> None:
    rate = LearningRate(
        shape="wsd", total_tokens=1000, warmup_fraction=0.1, decay_fraction=0.2, final_fraction=0.0
    )
    assert [rate.factor(tokens, 1) for tokens in (50, 100, 800, 900, 1000)] == [
        0.5,
        1,
        1,
        pytest.approx(0.5),
        0,
    ]


def test_wsd_whose_decay_would_begin_within_the_warm_up() -> None:
    """The decay takes what the warm-up leaves: the rate reaches its peak and never jumps."""
    rate = LearningRate(
        shape="wsd", total_tokens=1000, warmup_fraction=0.1, decay_fraction=1.0, final_fraction=0.0
    )
    found = [rate.factor(tokens, 1) for tokens in (99, 100, 550, 1000)]
    assert found == pytest.approx([0.99, 1, 0.5, 0])
    with pytest.raises(ValueError, match="cannot be lengthened"):
        rate.lengthened(101, 2000)


def test_a_warm_up_that_takes_the_whole_schedule_and_more_tokens_than_it() -> None:
    for shape in ("cosine", "wsd"):
        rate = LearningRate(shape=shape, total_tokens=1000, warmup_fraction=1.0)  # type: ignore[arg-type]
        assert [rate.factor(tokens, 1) for tokens in (500, 2000)] == [0.5, pytest.approx(0.1)]


def test_constant_and_coupling() -> None:
    assert LearningRate(shape="constant").factor(10**9, 1) == 1
    assert LearningRate(shape="constant", coupling="sqrt", reference_batch=8).factor(0, 32) == 2
    assert LearningRate(shape="constant", coupling="linear", reference_batch=8).factor(0, 32) == 4
    assert LearningRate(shape="constant", coupling="none", reference_batch=8).factor(0, 32) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"shape": "step"},
        {"warmup_fraction": 1.5},
        {"final_fraction": -1},
        {"decay_fraction": 0},
        {"decay_fraction": 1.5},
        {"coupling": "cubic"},
        {"reference_batch": 0},
        {"total_tokens": -1},
    ],
)
def test_refusals(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(settings))}"):
        LearningRate(**settings)  # type: ignore[arg-type]


def test_the_mean_of_powers_of_the_decay() -> None:
    """Half of the tokens are warm-up; (1 + cos) / 2 has the mean 1/2, and its square 3/8."""
    rate = LearningRate(shape="cosine", total_tokens=7, warmup_fraction=0.5, final_fraction=0.2)
    means = [rate.mean_decay(power) for power in (0, 1, 2)]
    falling = [1, 0.2 + 0.8 / 2, 0.2**2 + 2 * 0.2 * 0.8 / 2 + 0.8**2 * 3 / 8]
    assert means == pytest.approx([0.5 + 0.5 * mean for mean in falling], rel=1e-4)


def test_rounds_that_become_longer_need_a_rate_that_falls_but_not_to_0() -> None:
    for rate in (
        LearningRate(shape="constant", total_tokens=1000, final_fraction=0.5),
        LearningRate(shape="cosine", total_tokens=1000, final_fraction=0.0),
        LearningRate(shape="cosine", total_tokens=1000, final_fraction=1.0),
    ):
        rate.check_growth(0.0)
        with pytest.raises(ValueError, match="needs a learning rate that falls"):
            rate.check_growth(1.0)
    LearningRate(shape="wsd", total_tokens=1000, final_fraction=0.1).check_growth(1.0)


def test_a_schedule_that_becomes_longer_keeps_its_warmup_and_has_not_begun_to_fall() -> None:
    wsd = LearningRate(shape="wsd", total_tokens=1000, warmup_fraction=0.1, decay_fraction=0.2)
    longer = wsd.lengthened(800, 2000)
    assert (longer.total_tokens, longer.warmup_fraction) == (2000, 0.05)
    assert wsd.lengthened(900, 1000) == wsd
    constant, cosine = replace(wsd, shape="constant"), replace(wsd, shape="cosine")
    assert constant.lengthened(900, 2000) == constant
    with pytest.raises(ValueError, match="cosine cannot be lengthened"):
        cosine.lengthened(0, 2000)
    with pytest.raises(ValueError, match="cannot be lengthened to 2,000 tokens"):
        wsd.lengthened(801, 2000)
