"""The closed form of a round's time, against hand arithmetic and draws."""

import math

import numpy as np
import pytest

from adloco.plan.cluster import Cluster
from adloco.plan.round_time import Sync, expected_largest, mean_round, round_time


def cluster(**settings: object) -> Cluster:
    given: dict[str, object] = {
        "islands": 4,
        "bandwidth": "8mbit",
        "latency": "500ms",
        "samples_per_second": {4: 8.0},
    }
    return Cluster(**given | settings)  # type: ignore[arg-type]


def test_a_plain_round() -> None:
    """10 steps of 0.5 s, then 3 MB at 1 MB/s and 2 x 3 latencies of 0.5 s: 5 s + 6 s."""
    found = round_time(cluster(), [0.5] * 4, 10, Sync(workers=4, bytes_sent=3e6))
    assert (found.computing, found.waiting, found.transfer, found.lost) == (5.0, 0.0, 6.0, 0.0)
    assert found.utilisation == pytest.approx(5 / 11)


def test_all_to_all_pays_two_latencies() -> None:
    sync = Sync(workers=4, bytes_sent=3e6)
    assert round_time(cluster(pattern="all-to-all"), [0.5] * 4, 10, sync).transfer == 4.0


def test_streaming_hides_what_fits_beside_tau_steps() -> None:
    """Two fragments of 1 MB, each 1 s + 3 s of latencies, beside 4 steps of 0.5 s: 2 s of each are
    waited for.
    """
    sync = Sync(workers=4, bytes_sent=2e6, fragments=2, tau=4)
    assert round_time(cluster(), [0.5] * 4, 10, sync).transfer == pytest.approx(4.0)
    assert round_time(cluster(latency="0s"), [0.5] * 4, 10, sync).transfer == 0.0


def test_a_round_that_is_cut_short_hides_no_more_than_its_steps() -> None:
    """Two fragments of 4 s, each beside 2 of 4 steps of 0.5 s: 3 s of each are waited for."""
    sync = Sync(workers=4, bytes_sent=2e6, fragments=2, tau=8)
    assert round_time(cluster(), [0.5] * 4, 4, sync).transfer == pytest.approx(6.0)


def test_the_slowest_island_is_waited_for() -> None:
    found = round_time(cluster(), [0.5, 0.5, 0.5, 1.0], 10, Sync(workers=1, bytes_sent=0))
    assert (found.computing, found.waiting, found.transfer) == (6.25, 3.75, 0.0)


def test_the_expected_largest_of_normal_numbers() -> None:
    """Of two normal numbers with deviations s and t it is sqrt((s^2 + t^2) / (2 pi)), of three
    standard ones 3 / (2 sqrt(pi)).
    """
    unlike = math.sqrt(1.01 / (2 * math.pi))
    assert expected_largest((0, 0), (1, 0.1)) == pytest.approx(unlike, abs=1e-6)
    assert expected_largest((0, 0), (1, 1)) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-6)
    assert expected_largest((5, 5, 5), (2, 2, 2)) == pytest.approx(
        5 + 2 * 1.5 / math.sqrt(math.pi), abs=1e-6
    )
    draws = np.random.default_rng(0).normal([1, 2, 3], [1, 0.5, 0.2], (400_000, 3)).max(axis=1)
    assert expected_largest((1, 2, 3), (1, 0.5, 0.2)) == pytest.approx(draws.mean(), abs=0.003)


def test_jitter_makes_workers_wait_by_the_square_root_of_h() -> None:
    """100 steps of 1 s with deviations of 0.1 s: sums deviate by 1 s."""
    found = round_time(
        cluster(jitter=0.1, islands=2), [1.0, 1.0], 100, Sync(workers=2, bytes_sent=0)
    )
    assert found.waiting == pytest.approx(1 / math.sqrt(math.pi), abs=1e-6)


@pytest.mark.parametrize(
    ("bytes_sent", "stretches"), [(0.0, (40, 50, 10)), (1e9, (40, 10, 40, 10))]
)
def test_streaming_workers_wait_at_departures_and_late_arrivals(
    bytes_sent: float, stretches: tuple[int, ...]
) -> None:
    """Two fragments leave after steps 40 and 90 and arrive after 50 and 100."""
    found = round_time(
        cluster(jitter=0.1, islands=2, latency="0s"),
        [1.0, 1.0],
        100,
        Sync(workers=2, bytes_sent=bytes_sent, fragments=2, tau=10),
    )
    expected = sum(0.1 * math.sqrt(steps / math.pi) for steps in stretches)
    assert found.waiting == pytest.approx(expected, abs=1e-5)


def test_a_sync_takes_time_besides_its_transfer() -> None:
    """0.3 s, and 0.2 s of transfer, beside 10 steps of 0.5 s, or beside one."""
    slow = cluster(sync_seconds=0.3, latency="0s")
    sent = slow.link.bytes_per_second * 0.2
    sync = Sync(workers=4, bytes_sent=sent)
    assert round_time(slow, [0.5] * 4, 10, sync).total == pytest.approx(5.5)
    assert round_time(slow, [0.5] * 4, 1, sync).total == pytest.approx(1.0)
    halves = Sync(workers=4, bytes_sent=2 * sent, fragments=2)
    assert round_time(slow, [0.5] * 4, 10, halves).total == pytest.approx(6.0)
    alone = Sync(workers=1, bytes_sent=0)
    assert round_time(slow, [0.5], 10, alone).total == pytest.approx(5.0)


def test_rounds_of_different_lengths_take_their_mean() -> None:
    """By hand, of three rounds of 10 steps and one of 11."""
    sync, jittery, seconds = Sync(workers=4, bytes_sent=3e6), cluster(jitter=0.1), [0.5] * 4
    shorter, longer = (round_time(jittery, seconds, steps, sync) for steps in (10, 11))
    found = mean_round(jittery, seconds, 10.25, sync)
    assert found.computing == pytest.approx(0.5 * 10.25)
    assert found.total == pytest.approx((3 * shorter.total + longer.total) / 4)
    assert mean_round(jittery, seconds, 10.0, sync) == shorter


def test_failures_repeat_the_round() -> None:
    """Draws: seconds until a gap of T between failures, with a restart after each."""
    failing = cluster(failures_per_day=864.0, restart_seconds=20.0)
    assert failing.failures_per_second == pytest.approx(0.04)
    found = round_time(failing, [0.5] * 4, 10, Sync(workers=4, bytes_sent=3e6))
    random, totals = np.random.default_rng(0), []
    for _ in range(20_000):
        total = 0.0
        while (gap := random.exponential(1 / 0.04)) < 11:
            total += gap + 20
        totals.append(total + 11)
    assert found.total == pytest.approx(np.mean(totals), rel=0.02)
    assert found.lost == pytest.approx(found.total - 11)


def test_a_round_that_nearly_never_succeeds_is_finite() -> None:
    """A year of such rounds must not overflow: only a target out of reach is infinite."""
    found = round_time(
        cluster(failures_per_day=1.0), [0.5] * 4, 10, Sync(workers=4, bytes_sent=1e15)
    )
    assert 1e100 < found.total * 1e9 < math.inf
