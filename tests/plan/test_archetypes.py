"""The wall-clock model and the three networks of arXiv 2503.09799 (appendix on wall-clock time),
written down here on their own, against the closed form of a round.

There, an all-reduce of N bf16 parameters among R chips takes 2 N / W (1 - 1 / R) + latency, with W
in parameters per second; DiLoCo's replicas also all-reduce inside in every step, over the fast
network. Nothing overlaps.
"""

import pytest

from adloco.distributed.traffic import ring
from adloco.plan.cluster import Cluster
from adloco.plan.round_time import Sync, round_time

NETWORKS = {"high": (400e9, 1e-4), "medium": (100e9, 1e-3), "low": (10e9, 1e-2)}
"""Bits per second and latency in seconds."""
CHIP_FLOPS = 300e12


def published_step(
    parameters: float, tokens: float, chips: int, replicas: int, every: int, network: str
) -> tuple[float, float]:
    """(compute, all) seconds of an inner step; one replica is data-parallel training."""
    (fast, fast_latency), (slow, slow_latency) = NETWORKS["high"], NETWORKS[network]
    compute = 6 * parameters * tokens / (chips * CHIP_FLOPS)
    outer = 2 * parameters * 16 / slow * (1 - 1 / chips) + slow_latency
    if replicas == 1:
        return compute, compute + outer
    inner = 2 * parameters * 16 / fast * (1 - replicas / chips) + fast_latency
    return compute, compute + inner + outer / every


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("parameters", [2.4e9, 10e9])
@pytest.mark.parametrize(("replicas", "every"), [(1, 1), (2, 1), (2, 30), (4, 100), (8, 300)])
def test_published_times(network: str, parameters: float, replicas: int, every: int) -> None:
    chips, tokens = 512, 2**21
    compute, wanted = published_step(parameters, tokens, chips, replicas, every, network)
    fast, fast_latency = NETWORKS["high"]
    inner = 2 * parameters * 16 / fast * (1 - replicas / chips) + fast_latency
    slow, latency = NETWORKS[network]
    cluster = Cluster(
        islands=chips,
        bandwidth=f"{slow / 1e9}gbit",
        latency=f"{latency / 2:.6f}s",  # An exchange of all with all has two latencies.
        pattern="all-to-all",
        samples_per_second={1: 1.0},
    )
    step = compute + (inner if replicas > 1 else 0.0)
    sync = Sync(workers=chips, bytes_sent=ring(chips) * 2 * parameters)
    found = round_time(cluster, [step] * chips, every, sync)
    assert found.total / every == pytest.approx(wanted)


def test_what_the_networks_decide() -> None:
    """10e9 parameters, 2M tokens a step, 512 chips: on the low network data-parallel training takes
    40 times as long as it computes; DiLoCo with H = 300 takes a fifteenth longer than if it never
    synced.
    """
    compute, parallel = published_step(10e9, 2**21, 512, 1, 1, "low")
    assert 39 < parallel / compute < 41
    _, diloco = published_step(10e9, 2**21, 512, 2, 300, "low")
    _, free = published_step(10e9, 2**21, 512, 2, 10**9, "low")
    assert diloco / free == pytest.approx(1 + 1 / 15, abs=0.01)
