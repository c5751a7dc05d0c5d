"""Spikes of a loss: the running mean and deviation against NumPy, and the limit by hand."""

import math

import numpy as np
import pytest

from adloco.lab.spikes.losses import FEWEST, WINDOW, LossRange, Spike
from adloco.lab.spikes.option import Spikes


def test_the_first_losses_count_alike() -> None:
    losses = np.random.default_rng(0).normal(3, 0.1, WINDOW)
    seen = LossRange()
    seen.see(losses.tolist(), limit=1e9)
    assert seen.to_numbers() == pytest.approx((losses.mean(), losses.var(), WINDOW))


def test_later_losses_are_weighted_by_their_age() -> None:
    losses = np.random.default_rng(1).normal(3, 0.1, 3 * WINDOW)
    weights = np.full(WINDOW, 1 / WINDOW)
    for _ in losses[WINDOW:]:
        weights = np.append(weights * (1 - 1 / WINDOW), 1 / WINDOW)
    mean = float(weights @ losses)
    seen = LossRange()
    seen.see(losses.tolist(), limit=1e9)
    expected = (mean, float(weights @ (losses - mean) ** 2), len(losses))
    assert seen.to_numbers() == pytest.approx(expected)


def calm() -> LossRange:
    """Losses with mean 2 and deviation 0.1."""
    seen = LossRange()
    assert seen.see([1.9, 2.1] * (FEWEST // 2), limit=1.5) is None
    return seen


def test_a_loss_beyond_the_limit_is_a_spike() -> None:
    assert calm().see([2.0, 2.39, 1.0], limit=4) is None
    spike = calm().see([2.6, 2.0, 2.9], limit=4)
    assert spike is not None
    # The first counted as 2.4: the mean became 2 + 0.4/51, the variance about 0.0129.
    variance = 50 / 51 * (0.01 + 0.4**2 / 51)
    mean = 2 + 0.4 / 51
    mean, variance = mean + (2 - mean) / 52, 51 / 52 * (variance + (2 - mean) ** 2 / 52)
    deviations = (2.9 - mean) / math.sqrt(variance)
    assert spike == Spike(steps=2, highest=2, deviations=pytest.approx(deviations))


def test_a_level_that_stays_is_soon_no_spike() -> None:
    seen = calm()
    spikes = [seen.see([3.0], limit=6) is not None for _ in range(100)]
    assert spikes[0]
    assert not any(spikes[20:])


def test_the_start_and_what_is_not_finite_are_not_judged() -> None:
    assert LossRange().see([2.0, 2.1] * (FEWEST // 2 - 1) + [50.0], limit=1) is None
    seen = calm()
    before = seen.to_numbers()
    assert seen.see([math.nan, math.inf], limit=1) is None
    assert seen.to_numbers() == before
    constant = LossRange()
    assert constant.see([2.0] * 60 + [2.1], limit=6) is None, "without a deviation there is none"


def test_healthy_losses_have_no_spikes() -> None:
    """A loss that falls from 5 to 1 with normal noise of 5%."""
    generator = np.random.default_rng(2)
    steps = np.arange(5000)
    losses = (1 + 4 * np.exp(-steps / 1000)) * generator.normal(1, 0.05, len(steps))
    assert LossRange().see(losses.tolist(), limit=Spikes().spike_deviations) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spike_deviations": -1.0}, "spike_deviations must be in \\[0, inf\\), got -1.0"),
        ({"spike_deviations": math.inf}, "spike_deviations must be in \\[0, inf\\), got inf"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spikes(**settings)  # type: ignore[arg-type]


def test_a_spike_is_said_and_warned_of() -> None:
    calm = {"trainer": 0, "spikes": 0}
    spike = {"trainer": 1, "spikes": 2, "spike_step": 120, "spike_deviations": 8.26}
    record = {"round": 2, "trainers": [calm, spike]}
    (sign,) = Spikes.signs(record)
    assert (sign.kind, sign.trainer, sign.round) == ("loss spike", 1, 2)
    said = "the loss of trainer 1 at inner step 120 was 8.3 deviations above its running mean"
    assert [sign.seen] == [*Spikes.events(record)] == [said]
