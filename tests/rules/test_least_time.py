"""Closed forms for the least time to a loss, against brute force."""

import math

import pytest

from adloco.rules.least_time import fastest_sync_every


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
