"""Measures the links between ranks that stand for islands: bandwidth, latency, and by how much
their clocks differ.

The ranks form a ring. Bandwidth is measured on all links at once, as a sync uses them; latency on
one link after another. All by gloo, so over TCP, on GPUs too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.messages import all_states

PINGS = 10
SMALLEST_BYTES, LARGEST_BYTES, GROWTH = 1 << 16, 1 << 28, 4
ENOUGH_SECONDS, REPEATS = 1.0, 3
"""A transfer of a size that takes so long on the slowest link is repeated and counts."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Measurements of the link from one rank to the next in the ring."""

    source: int
    target: int
    bytes_per_second: float
    latency_seconds: float
    """One way: half of the shortest round trip."""
    clock_seconds: float
    """By how much the clock of the target is ahead of the source's."""


def measure_links(ranks: Sequence[int]) -> list[MeasuredLink]:
    """Measure the links of a ring, one from each of its ranks. Called on all ranks, inside
    `process_group`; all get the same.

    It takes some seconds: transfers grow until one takes a second on the slowest link.

    ranks: One rank of each island, at least two.
    """
    links = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    pings = _pings(links)
    size = SMALLEST_BYTES
    received = _shift(ranks, size)
    while max(received) < ENOUGH_SECONDS and size < LARGEST_BYTES:
        size *= GROWTH
        received = _shift(ranks, size)
    repeated = [received, *(_shift(ranks, size) for _ in range(REPEATS - 1))]
    measured = []
    for source, target in links:
        seconds = median(each[target] for each in repeated)
        trip, ahead = pings[source]
        # What is sent first arrives after the latency, which is part of the seconds.
        measured.append(
            MeasuredLink(
                source=source,
                target=target,
                bytes_per_second=size / max(seconds - trip / 2, seconds / 2),
                latency_seconds=trip / 2,
                clock_seconds=ahead,
            )
        )
    return measured


def _pings(links: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """For each rank, of the link that begins there: seconds of the shortest round trip, and by how
    much the target's clock is ahead.
    """
    rank, mine = this_rank(), (0.0, 0.0)
    for source, target in links:
        if rank == source:
            mine = min(_ping(target) for _ in range(PINGS))
        if rank == target:
            for _ in range(PINGS):
                _answer(source)
        dist.barrier()  # One link at a time.
    return all_states(mine)


def _shift(ranks: Sequence[int], size: int) -> list[float]:
    """Send so many bytes over all links at once; for each rank, the seconds until it had received
    them, 0 if it is not in the ring.
    """
    seconds, takes_part = 0.0, this_rank() in ranks
    if takes_part:
        place = ranks.index(this_rank())
        after = ranks[(place + 1) % len(ranks)]
        outgoing, incoming = torch.ones(2, size, dtype=torch.uint8)
    dist.barrier()
    if takes_part:
        began = time.perf_counter()
        sending = dist.isend(outgoing, after)
        dist.recv(incoming, ranks[place - 1])
        seconds = time.perf_counter() - began
        assert sending is not None, "this rank is in the group"
        sending.wait()
    return all_states(seconds)


def _ping(target: int) -> tuple[float, float]:
    """Seconds of a round trip, and by how much the target's clock is ahead."""
    message = torch.zeros(1, dtype=torch.float64)
    began, sent = time.perf_counter(), time.time()
    dist.send(message, target)
    dist.recv(message, target)
    there = float(message)
    trip = time.perf_counter() - began
    return trip, there - sent - trip / 2


def _answer(source: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    dist.recv(message, source)
    dist.send(message.fill_(time.time()), source)
