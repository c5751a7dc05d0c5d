"""Closed forms for the least time to a loss, against brute force."""

import itertools
import math

import numpy as np
import pytest

from adloco.lab.auto.least_time import (
    StepSeconds,
    fastest_batch,
    fastest_multiplier,
    fastest_sync_every,
    fit_step_seconds,
)


@pytest.mark.parametrize(
    ("sync_seconds", "step_seconds", "cost"), [(3.0, 0.5, 0.05), (0.2, 0.1, 0.3), (8.0, 0.02, 0.1)]
)
def test_sync_every_is_the_least_of_a_grid(
    sync_seconds: float, step_seconds: float, cost: float
) -> None:
    def seconds(steps: float) -> float:
        return steps**cost * (step_seconds + sync_seconds / steps)

    grid = [1.001**power for power in range(-3000, 12000)]
    best = fastest_sync_every(sync_seconds=sync_seconds, step_seconds=step_seconds, cost=cost)
    assert best == pytest.approx(min(grid, key=seconds), rel=2e-3)
    # Syncs then take the share `cost` of the time, and an H that is wrong by a fifth costs little.
    assert sync_seconds / (best * step_seconds + sync_seconds) == pytest.approx(cost)
    if cost <= 0.1:
        assert max(seconds(1.2 * best), seconds(best / 1.2)) < 1.002 * seconds(best)


def test_sync_every_without_seconds() -> None:
    assert fastest_sync_every(sync_seconds=0.0, step_seconds=0.1, cost=0.1) == 0
    assert fastest_sync_every(sync_seconds=1.0, step_seconds=0.0, cost=0.1) == math.inf


@pytest.mark.parametrize(
    ("noise_scale", "per_step", "per_sample", "sync_seconds"),
    [(100.0, 0.5, 0.02, 0.0), (30.0, 0.0, 0.1, 0.7), (900.0, 0.01, 0.3, 0.04)],
)
def test_the_batch_is_the_least_of_a_grid(
    noise_scale: float, per_step: float, per_sample: float, sync_seconds: float
) -> None:
    def seconds(batch: float) -> float:
        return (1 + batch / noise_scale) * (per_sample + (per_step + sync_seconds) / batch)

    step = StepSeconds(per_step=per_step, per_sample=per_sample)
    best = fastest_batch(noise_scale=noise_scale, seconds=step, sync_seconds=sync_seconds)
    grid = [1.001**power for power in range(-3000, 12000)]
    assert best == pytest.approx(min(grid, key=seconds), rel=2e-3)


def test_a_batch_of_samples_or_steps_without_seconds() -> None:
    free = StepSeconds(per_step=1.0, per_sample=0.0)
    assert fastest_batch(noise_scale=9.0, seconds=free, sync_seconds=1.0) == math.inf
    only = StepSeconds(per_step=0.0, per_sample=1.0)
    assert fastest_batch(noise_scale=9.0, seconds=only, sync_seconds=0.0) == 0


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [
        ([1.3, 2.1, 2.0, 5.5], "both"),
        ([0.1, 2.1, 2.0, 7.5], "through zero"),
        ([3.3, 2.1, 2.0, 1.5], "flat"),
    ],
)
def test_the_fit_is_the_least_of_a_grid(seconds: list[float], kind: str) -> None:
    batches = [4.0, 8.0, 10.0, 24.0]
    found = fit_step_seconds(batches, seconds)

    def squares(per_step: float, per_sample: float) -> float:
        return float(np.sum((per_step + per_sample * np.array(batches) - np.array(seconds)) ** 2))

    grid = itertools.product(np.arange(0, 4, 0.02), np.arange(0, 0.6, 0.005))
    least = min(squares(*point) for point in grid)
    assert least - 0.02 < squares(found.per_step, found.per_sample) <= least
    assert (found.per_step > 0, found.per_sample > 0) == {
        "both": (True, True),
        "through zero": (False, True),
        "flat": (True, False),
    }[kind]


def test_the_fit_takes_medians_of_equal_batches() -> None:
    # Two seconds and a quarter per sample, but for one round in which something else happened.
    found = fit_step_seconds([4, 4, 4, 8, 8, 8], [3.0, 3.0, 99.0, 4.0, 4.0, 4.0])
    assert (found.per_step, found.per_sample) == (pytest.approx(2.0), pytest.approx(0.25))
    alike = fit_step_seconds([4, 4, 4], [3.0, 1.0, 2.0])
    assert (alike.per_step, alike.per_sample) == (0.0, 0.5)


@pytest.mark.parametrize("noise_scale", [3.0, 20.0, 200.0, math.inf])
@pytest.mark.parametrize("per_step", [0.0, 0.02, 0.3, 5.0])
@pytest.mark.parametrize("maximum", [1.0, 1.4, 2.0, 3.5])
def test_n_is_the_first_request_that_is_faster_than_a_clipped_one(
    noise_scale: float, per_step: float, maximum: float
) -> None:
    """Brute force over requests from 8 samples, which fit, to n = `maximum` times as many."""
    fits, per_sample, sync_seconds = 8.0, 0.05, 0.01

    def seconds(samples: float) -> float:
        step = per_step + math.ceil(samples / fits) * per_sample * fits
        return (1 + samples / noise_scale) * (step + sync_seconds) / samples

    found = fastest_multiplier(
        noise_scale=noise_scale,
        fits=fits,
        seconds=StepSeconds(per_step=per_step, per_sample=per_sample),
        sync_seconds=sync_seconds,
        maximum=maximum,
    )
    requests = [fits * (1 + index / 4096) for index in range(1, int(4096 * (maximum - 1)))]
    faster = [samples / fits for samples in requests if seconds(samples) < seconds(fits)]
    assert found == pytest.approx(faster[0] if faster else maximum, abs=1e-3)


def test_n_by_hand() -> None:
    """A full pass takes a second, and a step c seconds more. Without an end to the noise scale n is
    (2 + c) / (1 + c): nearly 2 if c is small, as published, and nearly 1 if it is large.
    """
    for more, expected in ((0.001, 2.001 / 1.001), (1.0, 1.5), (99.0, 1.01)):
        step = StepSeconds(per_step=more, per_sample=0.125)
        assert fastest_multiplier(
            noise_scale=math.inf, fits=8, seconds=step, sync_seconds=0.0, maximum=4.0
        ) == pytest.approx(expected)
    # With nothing but seconds of samples it is never better to accumulate.
    only = StepSeconds(per_step=0.0, per_sample=0.125)
    for step in (only, StepSeconds(per_step=0.0, per_sample=0.0)):
        assert (
            fastest_multiplier(
                noise_scale=50.0, fits=8, seconds=step, sync_seconds=0.0, maximum=4.0
            )
            == 4.0
        )


def test_batches_that_hardly_differ_tell_no_slope() -> None:
    seconds = fit_step_seconds([64, 65, 64, 65], [0.75, 0.74, 0.76, 0.73])
    assert seconds.per_step == 0 and 0.01 < seconds.per_sample < 0.013
