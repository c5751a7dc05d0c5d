"""Links between ranks, measured by a clock that the test turns."""

from types import SimpleNamespace

import torch.distributed as dist

from adloco.distributed.launch import link_probe
from adloco.distributed.launch.link_probe import MeasuredLink, measure_links
from adloco.distributed.testing import run_on_ranks


def measured_by_a_clock() -> list[MeasuredLink]:
    """The clock continues by half a second whenever it is read; that of rank 1 is 5 s ahead."""
    reads = iter(range(10**6))
    now = 1e9 + 5 * (dist.get_rank() == 1)
    clock = SimpleNamespace(perf_counter=lambda: next(reads) / 2, time=lambda: now)
    link_probe.time = clock  # type: ignore[assignment]
    link_probe.LARGEST_BYTES = 1 << 20
    return measure_links([0, 1, 2])


def test_links_of_a_ring() -> None:
    """A transfer takes 0.5 s, never a whole one, so that the size grows to 1 MiB; half a round trip
    of 0.5 s is latency. The answer comes 0.25 s after the ping was sent.
    """
    results = run_on_ranks(measured_by_a_clock, 4)
    links = results[0]
    assert all(found == links for found in results)
    assert [(link.source, link.target) for link in links] == [(0, 1), (1, 2), (2, 0)]
    assert [link.bytes_per_second for link in links] == [2**20 / 0.25] * 3
    assert [link.latency_seconds for link in links] == [0.25] * 3
    assert [link.clock_seconds for link in links] == [4.75, -5.25, -0.25]
