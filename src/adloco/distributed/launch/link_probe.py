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
    """Measure the links of a ring. Called on all ranks, inside `process_group`.

    It takes some seconds: transfers grow until one takes a second on the slowest link.

    Args:
        ranks: One rank of each island, at least two.

    Returns:
        A link for each of the ranks, the same on all ranks.
    """
    ring = _Ring(ranks)
    pings = ring.pings()
    size, slowest = SMALLEST_BYTES, 0.0
    while slowest < ENOUGH_SECONDS and size <= LARGEST_BYTES:
        received = ring.shift(size)
        slowest = max(received.values())
        size *= GROWTH
    size //= GROWTH
    repeated = [received, *(ring.shift(size) for _ in range(REPEATS - 1))]
    links = []
    for source, target in ring.links:
        seconds = median(each[target] for each in repeated)
        trip, ahead = pings[source]
        # What is sent first arrives after the latency, which is part of the seconds.
        links.append(
            MeasuredLink(
                source=source,
                target=target,
                bytes_per_second=size / max(seconds - trip / 2, seconds / 2),
                latency_seconds=trip / 2,
                clock_seconds=ahead,
            )
        )
    return links


class _Ring:
    """The ranks, each of which sends to the next."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._rank = this_rank()
        self.links = list(zip(self._ranks, [*self._ranks[1:], self._ranks[0]], strict=True))

    def pings(self) -> dict[int, tuple[float, float]]:
        """Source of each link -> seconds of the shortest round trip, and by how much the target's
        clock is ahead.
        """
        mine: list[float] = []
        for source, target in self.links:
            if self._rank == source:
                mine = list(min(self._ping(target) for _ in range(PINGS)))
            if self._rank == target:
                for _ in range(PINGS):
                    self._answer(source)
            dist.barrier()  # One link at a time.
        found = all_states(mine)
        return {source: (found[source][0], found[source][1]) for source, _ in self.links}

    def shift(self, size: int) -> dict[int, float]:
        """Send so many bytes over all links at once: rank -> seconds until it had received them."""
        seconds = 0.0
        if self._rank in self._ranks:
            place = self._ranks.index(self._rank)
            after = self._ranks[(place + 1) % len(self._ranks)]
            outgoing, incoming = torch.ones(2, size, dtype=torch.uint8)
        dist.barrier()
        if self._rank in self._ranks:
            began = time.perf_counter()
            sending = dist.isend(outgoing, after)
            dist.recv(incoming, self._ranks[place - 1])
            seconds = time.perf_counter() - began
            assert sending is not None, "this rank is in the group"
            sending.wait()
        found = all_states(seconds)
        return {rank: found[rank] for rank in self._ranks}

    def _ping(self, target: int) -> tuple[float, float]:
        """Seconds of a round trip, and by how much the target's clock is ahead."""
        message = torch.zeros(1, dtype=torch.float64)
        began, sent = time.perf_counter(), time.time()
        dist.send(message, target)
        dist.recv(message, target)
        there = float(message)
        trip = time.perf_counter() - began
        return trip, there - sent - trip / 2

    def _answer(self, source: int) -> None:
        message = torch.zeros(1, dtype=torch.float64)
        dist.recv(message, source)
        dist.send(message.fill_(time.time()), source)
