"""The simulation of rounds, against the closed form, hand arithmetic and draws."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from adloco.plan.cluster import Cluster
from adloco.plan.round_time import RoundTime, Sync, round_time
from tests.plan.simulation import Simulated, simulate

STEPS = [0.5] * 4
PLAIN = Sync(workers=4, bytes_sent=3e6)


def cluster(**settings: object) -> Cluster:
    given: dict[str, object] = {
        "islands": 4,
        "bandwidth": "8mbit",
        "latency": "500ms",
        "samples_per_second": {4: 8.0},
        "restart_seconds": 10.0,
    }
    return Cluster(**given | settings)  # type: ignore[arg-type]


def check_within_errors(found: Simulated, expected: RoundTime) -> None:
    """Every part and the total are within 4 standard errors."""
    for name, error in found.errors.items():
        wanted = getattr(expected, name)
        assert getattr(found.time, name) == pytest.approx(wanted, abs=4 * error + 1e-9), name


@pytest.mark.parametrize("pattern", ["ring", "all-to-all"])
@pytest.mark.parametrize("step_seconds", [STEPS, [0.5, 0.6, 0.7, 0.8]])
@pytest.mark.parametrize(
    ("sync_every", "sync"),
    [
        (10, PLAIN),
        (1, PLAIN),
        (10, Sync(workers=4, bytes_sent=2e6, fragments=2)),
        (10, Sync(workers=4, bytes_sent=2e6, fragments=2, tau=4)),
        (100, Sync(workers=4, bytes_sent=2e6, fragments=2, tau=40)),
    ],
    ids=["plain", "data-parallel", "fragments", "late", "hidden"],
)
def test_without_chance_it_is_the_closed_form(
    pattern: str, step_seconds: Sequence[float], sync_every: int, sync: Sync
) -> None:
    given = cluster(pattern=pattern)
    found = simulate(given, step_seconds, sync_every, sync, rounds=3)
    wanted = round_time(given, step_seconds, sync_every, sync)
    assert asdict(found.time) == pytest.approx(asdict(wanted), abs=1e-9)
    assert max(found.errors.values()) < 1e-9


def test_a_late_fragment_delays_the_next_one() -> None:
    """Twice: a step of 1 s, and a transfer of 10 s beside four steps."""
    sync = Sync(workers=4, bytes_sent=14e6, fragments=2, tau=4)
    found = simulate(cluster(), [1.0] * 4, 10, sync, rounds=2).time
    assert (found.total, found.transfer) == (pytest.approx(22.0), pytest.approx(12.0))
    assert (found.utilisation, found.lost) == (pytest.approx(10 / 22), 0.0)


@pytest.mark.parametrize("step_seconds", [STEPS, [0.5, 0.5, 0.5, 0.52]])
def test_jitter(step_seconds: Sequence[float]) -> None:
    given = cluster(jitter=0.1)
    found = simulate(given, step_seconds, 50, PLAIN, rounds=400)
    assert found.errors["waiting"] < 0.05 * found.time.waiting
    check_within_errors(found, round_time(given, step_seconds, 50, PLAIN))


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_failures(jitter: float) -> None:
    given = cluster(jitter=jitter, failures_per_day=432.0)
    found = simulate(given, STEPS, 10, PLAIN, rounds=1000)
    assert found.errors["lost"] < 0.1 * found.time.lost
    check_within_errors(found, round_time(given, STEPS, 10, PLAIN))


@pytest.mark.parametrize("transfer_seconds", [0.0, 1.0, 4.0])
def test_streaming_with_jitter(transfer_seconds: float) -> None:
    """Each of four fragments is hidden by, or outlasts, four steps of 0.5 s."""
    given = cluster(jitter=0.1, latency="0s")
    sync = Sync(workers=4, bytes_sent=4e6 * transfer_seconds, fragments=4, tau=4)
    found = simulate(given, STEPS, 50, sync, rounds=200)
    assert found.errors["waiting"] < 0.05 * found.time.waiting
    check_within_errors(found, round_time(given, STEPS, 50, sync))


def test_transfers_that_take_as_long_as_the_steps_beside_them() -> None:
    """The case of docs/plan.md, where the closed form is furthest from the simulation."""
    given, steps = cluster(islands=8, jitter=0.2, latency="0s"), [0.5] * 8
    sync = Sync(workers=8, bytes_sent=8.8e6, fragments=4, tau=4)
    found = simulate(given, steps, 50, sync, rounds=200)
    ratio = found.time.total / round_time(given, steps, 50, sync).total
    assert ratio == pytest.approx(1.018, abs=4 * found.errors["total"] / found.time.total)
    assert found.errors["total"] < 0.0015 * found.time.total


def test_sums_of_few_steps_are_skewed() -> None:
    """The case of docs/plan.md with H = 1, against draws."""
    given, sync = cluster(islands=8, jitter=0.2, latency="0s"), Sync(workers=8, bytes_sent=0.0)
    found = simulate(given, [0.5] * 8, 1, sync, rounds=1500)
    drawn = np.random.default_rng(1).gamma(25, 0.02, (100_000, 8)).max(axis=1).mean() - 0.5
    assert found.time.waiting == pytest.approx(drawn, abs=4 * found.errors["waiting"])
    closed = round_time(given, [0.5] * 8, 1, sync).waiting
    assert (drawn, closed) == (pytest.approx(0.151, abs=1e-3), pytest.approx(0.142, abs=5e-4))


def test_late_fragments_with_jitter() -> None:
    """Draws: a fragment leaves after step 46 and takes about as long as the four steps beside it,
    so some workers wait for it and for some it waits.
    """
    sync = Sync(workers=4, bytes_sent=2e6, tau=4)
    found = simulate(cluster(jitter=0.2, latency="0s"), STEPS, 50, sync, rounds=400)
    random = np.random.default_rng(1)
    before = random.gamma(46 / 0.04, 0.5 * 0.04, (100_000, 4)).max(axis=1)
    beside = random.gamma(4 / 0.04, 0.5 * 0.04, (100_000, 4)).max(axis=1)
    total = (before + np.maximum(beside, 2.0)).mean()
    assert found.time.total == pytest.approx(total, abs=4 * found.errors["total"])
    late = np.maximum(0, 2.0 - beside).mean()
    assert found.time.transfer == pytest.approx(late, abs=4 * found.errors["transfer"])
