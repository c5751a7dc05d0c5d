"""Overlap of data-parallel training: gradients that leave during the backward pass."""

import dataclasses

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.plan.cluster import Cluster
from adloco.plan.exchange import exchange_of
from adloco.plan.gradient_buckets import Buckets
from adloco.plan.round_time import Sync, round_time
from tests.plan.simulation import simulate

MANY = Buckets(parts=(0.001,) * 1000, backward=2 / 3)


def cluster(**settings: object) -> Cluster:
    given = {"islands": 4, "bandwidth": "8mbit", "samples_per_second": {4: 8.0}} | settings
    return Cluster(**given)  # type: ignore[arg-type]


def test_buckets_by_hand() -> None:
    """Of 4 MB a quarter leaves when a quarter of the backward pass is over: after 1.5 of 3 s, of
    which the pass takes the last 2. It arrives after 2.5 s; the rest leaves at 3 and takes 3 s.
    """
    buckets = Buckets(parts=(0.25, 0.75), backward=2 / 3)
    assert list(buckets.leave_at()) == pytest.approx([1.5 / 3, 1.0])
    assert buckets.late(4.0, 3.0) == pytest.approx(3.0)
    # Of 16 s of transfer the first bucket takes 4, until 5.5 s: 2.5 s after the step.
    assert buckets.late(16.0, 3.0) == pytest.approx(2.5 + 12)


def test_the_defaults_of_ddp() -> None:
    mib = 2**20
    assert Buckets.of(mib / 2, passes=1).parts == (1.0,)
    whole = Buckets.of(54 * mib, passes=2)
    assert whole.parts == pytest.approx((1 / 54, 25 / 54, 25 / 54, 3 / 54))
    assert whole.backward == pytest.approx(1 / 3)


@pytest.mark.parametrize(("shards", "backward"), [("1", 1 / 3), ("2", None)])
def test_only_whole_models_overlap_and_only_with_the_last_pass(
    shards: str, backward: float | None
) -> None:
    recipe = build_recipe(
        override(
            read_values("ddp"), [("placement.shard_size", shards), ("placement.replica_size", "0")]
        )
    )
    sync = exchange_of(recipe, 1e6, 4, cluster(), passes=2)
    assert (sync.buckets and sync.buckets.backward) == backward
    assert sync.exchanges == 2, "gradients, then losses and norms"


@pytest.mark.parametrize("megabytes", [0.0, 0.2, 1.0, 5.0, 1000.0])
def test_small_buckets_take_the_longer_of_backward_and_transfer(megabytes: float) -> None:
    """A step of 3 s, 1 MB/s: max(1 + 2, 1 + transfer); without a link it is the computation."""
    sync = Sync(workers=4, bytes_sent=1e6 * megabytes, buckets=MANY)
    found = round_time(cluster(), [3.0] * 4, 1, sync)
    assert found.total == pytest.approx(max(3.0, 1.0 + megabytes), rel=3e-3)
    assert found.computing == 3.0


def test_a_fast_computation_leaves_the_transfer() -> None:
    sync = Sync(workers=4, bytes_sent=5e6, buckets=MANY)
    assert round_time(cluster(), [1e-9] * 4, 1, sync).total == pytest.approx(5.0)


def test_one_bucket_hides_nothing() -> None:
    sync = Sync(workers=4, bytes_sent=5e6)
    one = dataclasses.replace(sync, buckets=Buckets(parts=(1.0,), backward=2 / 3))
    assert round_time(cluster(), [3.0] * 4, 1, one) == round_time(cluster(), [3.0] * 4, 1, sync)


def test_latencies_and_what_a_sync_takes_besides_are_not_hidden() -> None:
    """Two exchanges of 6 latencies each, and 0.1 s."""
    slow = cluster(latency="500ms", sync_seconds=0.1)
    sync = Sync(workers=4, bytes_sent=1e3, exchanges=2, buckets=MANY)
    assert round_time(slow, [3.0] * 4, 1, sync).transfer == pytest.approx(6.1, abs=1e-4)


@pytest.mark.parametrize("megabytes", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("step_seconds", [[3.0] * 4, [3.0, 2.0, 2.5, 1.0]])
def test_the_simulation_agrees(megabytes: float, step_seconds: list[float]) -> None:
    given = cluster(latency="10ms", sync_seconds=0.1)
    buckets = Buckets(parts=(0.1, 0.3, 0.3, 0.3), backward=2 / 3)
    sync = Sync(workers=4, bytes_sent=1e6 * megabytes, exchanges=2, buckets=buckets)
    found = simulate(given, step_seconds, 1, sync, rounds=2).time
    wanted = round_time(given, step_seconds, 1, sync)
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(wanted))


def test_the_simulation_agrees_with_jitter() -> None:
    given = cluster(jitter=0.1)
    sync = Sync(workers=4, bytes_sent=4e6, buckets=Buckets.of(54 * 2**20, passes=1))
    found = simulate(given, [3.0] * 4, 1, sync, rounds=400)
    wanted = round_time(given, [3.0] * 4, 1, sync)
    assert found.time.total == pytest.approx(wanted.total, abs=4 * found.errors["total"])
