"""Modelled times on a link, by hand."""

from typing import Any

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.plan.link import Link
from adloco.study.links import bytes_sent, link_seconds, num_syncs


def recipe(name: str, **flags: str) -> Recipe:
    pairs = [(key.replace("__", "."), value) for key, value in flags.items()]
    return build_recipe(override(read_values(name), pairs))


def record(round: int, *, exposed: float = 0.0, workers: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """A round of 10 inner steps of 100 tokens, 5 s, with a second of evaluation, and a sync of
    1 MB.
    """
    return {
        "inner_steps": 10 * round,
        "syncs": round,
        "seconds": 5.0 * round,
        "tokens": 1000 * round,
        "tokens_per_second": 250.0,
        "bytes_sent": 1e6 * round,
        "bytes_ddp_equivalent": 1e7 * round,
        "sync": {"exposed_seconds": exposed},
        "workers": [
            {"busy_seconds": 4.0 - exposed, "wait_seconds": 0.0},
            {"busy_seconds": 3.0 - exposed, "wait_seconds": 1.0},
        ],
        "trainers": [{"workers": number} for number in workers],
    }


def test_a_link_in_words() -> None:
    link = Link.parse("100mbit,20ms")
    assert (link.bytes_per_second, link.latency_seconds) == (12.5e6, 0.02)
    assert Link.parse("1.5 Gbit/s").bytes_per_second == 1.5e9 / 8
    small, large = Link.parse("8kbit,5us"), Link.parse("8gbit,2s")
    assert (small.bytes_per_second, small.latency_seconds) == (1e3, pytest.approx(5e-6))
    assert (large.bytes_per_second, large.latency_seconds) == (1e9, 2.0)
    for bad in ("100", "100mb", "mbit", "100mbit,20", "0mbit", "-1mbit", "100mbit,20m"):
        with pytest.raises(ValueError, match="--link must be a bandwidth in kbit, mbit or gbit"):
            Link.parse(bad)


def test_a_round_computes_and_then_sends() -> None:
    """5 s - 1 s waited, + 1 MB at 1 MB/s + 2 x (2 - 1) x 0.5 s: 6 s a round."""
    link = Link.parse("8mbit,500ms")
    rounds = [record(1, exposed=1.0), record(2, exposed=1.0)]
    assert link_seconds(rounds, recipe("diloco"), link, replicas=2) == [6.0, 12.0]
    four = [record(1, exposed=1.0, workers=(4,))]
    assert link_seconds(four, recipe("diloco"), link, replicas=2) == [4.0 + 1.0 + 6 * 0.5]


def test_the_largest_trainer_is_waited_for() -> None:
    """After a merge one of three trainers has two workers. The mean over four is 1 MB; these two
    send all of it, 2 MB each. Of trainers with three and two workers, the three send 2/3 of 5 MB,
    10/9 MB each.
    """
    link = Link.parse("8mbit")
    merged = [record(1, workers=(2, 1, 1))]
    assert link_seconds(merged, recipe("adloco"), link, replicas=2) == [5 + 2.0]
    unequal = link_seconds([record(1, workers=(3, 2))], recipe("adloco"), link, replicas=2)
    assert unequal == [pytest.approx(5 + 10 / 9)]
    alone = [record(1, workers=(1, 1))]
    assert link_seconds(alone, recipe("adloco"), link, replicas=2) == [5 + 1.0]


def test_data_parallel_training_sends_in_each_step() -> None:
    """10 MB of gradients in 10 steps: 5 s + 10 s + 10 x 1 s with two replicas; with four, the ring
    sends 2 x 3/4 of each gradient in 6 hops.
    """
    ddp, link = recipe("ddp"), Link.parse("8mbit,500ms")
    assert ddp.data_parallel and not recipe("single").data_parallel
    assert link_seconds([record(1)], ddp, link, replicas=2) == [25.0]
    assert bytes_sent(record(1), ddp, 4) == 1.5e7
    assert link_seconds([record(1)], ddp, link, replicas=4) == [5 + 15 + 10 * 6 * 0.5]
    assert (num_syncs(record(3), ddp), num_syncs(record(3), recipe("diloco"))) == (30, 3)


def test_streaming_waits_for_what_is_longer_than_its_steps() -> None:
    """Two fragments a round, tau = 2 steps of 0.4 s beside each: 1.6 s of 1 s + 2 s are hidden, and
    nothing by the evaluation.
    """
    link = Link.parse("8mbit,500ms")
    streaming = recipe("diloco", streaming__fragments="2", streaming__tau="2")
    rounds = [record(1), record(2)]
    assert link_seconds(rounds, streaming, link, replicas=2) == [5 + 3 - 1.6, 2 * (5 + 3 - 1.6)]
    # At 10 MB/s each is sent in 0.05 s, all of it beside the steps.
    fast = link_seconds([record(1)], streaming, Link.parse("80mbit"), replicas=2)
    assert fast == [pytest.approx(5.0)]
    silent = [record(1) | {"syncs": 0, "bytes_sent": 0.0}]
    assert link_seconds(silent, streaming, link, replicas=2) == [5.0]
    # Stopped in the round's last step and resumed: no speed is known, and 0.5 s a step are taken.
    stopped = record(1) | {"tokens_per_second": 0.0}
    assert link_seconds([stopped], streaming, link, replicas=2) == [5 + 3 - 2]


def test_the_slowest_worker_is_waited_for() -> None:
    """Steps of 10 s and of 20 s on two ranks, and a sync of 0.1 s: the first waits 10.1 s in it.
    A second of evaluation follows.
    """
    workers = [{"busy_seconds": busy, "wait_seconds": 20.0 - busy} for busy in (10.0, 20.0)]
    unequal = record(1, exposed=10.1) | {
        "seconds": 21.1,
        "tokens_per_second": 1000 / 20.1,
        "workers": workers,
    }
    assert link_seconds([unequal], recipe("diloco"), Link.parse("8mbit"), replicas=2) == [
        pytest.approx(20 + 1.0 + 1.0)
    ]


def test_a_round_that_is_cut_short_hides_no_more_than_its_steps() -> None:
    """Two fragments of half a second each on the link, in rounds of 4 steps of 0.025 s: tau of 8
    steps would hide 0.4 s, and there are 2 steps beside each.
    """
    short = record(1) | {
        "inner_steps": 4,
        "seconds": 0.1,
        "tokens_per_second": 10_000.0,
        "workers": [{"busy_seconds": 0.1, "wait_seconds": 0.0}],
    }
    streaming = recipe("diloco", streaming__fragments="2", streaming__tau="8")
    found = link_seconds([short], streaming, Link.parse("8mbit"), replicas=2)
    assert found == [pytest.approx(0.1 + 2 * (0.5 - 0.05))]
