"""The estimate of communications: its limits, and a fit that gives back what made the runs."""

import numpy as np
import pytest

from reproduce.steps_to_loss import StepsToLoss, fit_steps, noise_per_batch

LAW = StepsToLoss(min_steps=100, min_samples=3200)


def test_limits() -> None:
    """B = 32: at that batch twice the steps and twice the samples; the product of the excesses is
    1 at every batch (McCandlish et al.).
    """
    assert LAW.noise_scale == 32
    assert (LAW.steps(32), LAW.samples(32)) == (200, 6400)
    for batch in (1, 8, 500):
        assert LAW.samples(batch) == pytest.approx(batch * LAW.steps(batch))
        excess = (LAW.steps(batch) / 100 - 1) * (LAW.samples(batch) / 3200 - 1)
        assert excess == pytest.approx(1)


def test_the_norm_test_holds_a_batch() -> None:
    """eta = 0.5 unbiased holds 4 B, plug-in 3 B."""
    assert LAW.adaptive_steps(0.5) == pytest.approx(LAW.steps(128)) == pytest.approx(125)
    assert LAW.adaptive_steps(0.5, "plug-in") == pytest.approx(LAW.steps(96))
    assert LAW.adaptive_samples(0.5, "plug-in") == pytest.approx(LAW.samples(96))
    assert noise_per_batch(1.5) == 2.25
    with pytest.raises(ValueError, match="eta must be < 1 for the plug-in"):
        noise_per_batch(1.0, "plug-in")


def test_a_noise_scale_that_grows() -> None:
    """Progress p takes dS = (1 + B(p) / b) dp steps. With b = B(p) / eta^2 the formulas hold for
    any B(p), with E_min the integral of B; with a constant b they hold with its mean.
    """
    progress = np.linspace(0, 100, 100_001)
    scale = 5 + 0.01 * progress**2
    law = StepsToLoss(min_steps=100, min_samples=float(np.trapezoid(scale, progress)))
    batch = scale / 0.8**2
    steps = np.trapezoid(1 + scale / batch, progress)
    samples = np.trapezoid(batch * (1 + scale / batch), progress)
    assert law.adaptive_steps(0.8) == pytest.approx(steps)
    assert law.adaptive_samples(0.8) == pytest.approx(samples)
    assert law.steps(16) == pytest.approx(np.trapezoid(1 + scale / 16, progress))


def test_at_equal_samples_the_norm_test_and_a_constant_batch_take_equal_steps() -> None:
    """b in proportion to B^a takes as many steps as B^(1 - a), and fewest at a = 1/2."""
    progress = np.linspace(0, 1, 100_001)
    scale = np.exp(3 * progress)
    samples = 2 * np.trapezoid(scale, progress)

    def steps(power: float) -> float:
        batch = scale**power
        batch *= (samples - np.trapezoid(scale, progress)) / np.trapezoid(batch, progress)
        return float(np.trapezoid(1 + scale / batch, progress))

    assert steps(0) == pytest.approx(steps(1)) == pytest.approx(2)
    assert steps(0.25) == pytest.approx(steps(0.75)) == pytest.approx(1.88312, abs=1e-5)
    assert steps(0.5) == pytest.approx(1.84687, abs=1e-5)


def test_a_fit() -> None:
    batches = [4, 8, 16, 64]
    found = fit_steps(batches, [LAW.steps(batch) for batch in batches])
    assert (found.min_steps, found.min_samples) == pytest.approx((100, 3200))
    with pytest.raises(ValueError, match="at least two different batches"):
        fit_steps([8, 8], [10, 11])
    with pytest.raises(ValueError, match="steps must fall as batches grow"):
        fit_steps([8, 16], [10, 11])
