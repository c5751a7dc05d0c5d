"""The part of bench.py that needs slow links: an outer sync against a bare all_reduce over them.

Two ranks sit in network namespaces with a shaped link between them (`links_network.py`), which root
may make, and others where user namespaces are allowed.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from bench_pairs import Row, chosen
from links_network import (
    LinkShape,
    Network,
    die_with_parent,
    enter_private_namespaces,
    parse_bandwidth,
)
from sync import sync_times

RANKS, MILLIONS = 2, 10


def outer_sync(*, quick: bool) -> Iterator[Row]:
    """An outer sync against all_reduce of as many bytes, over links of two bandwidths."""
    enter_private_namespaces()
    for bandwidth, turns in chosen([("1gbit", 12), ("100mbit", 4)], quick):
        rate = parse_bandwidth(bandwidth)
        seconds = over_link(rate, MILLIONS * 10**6, turns)
        yield Row.of(
            f"outer sync (Nesterov), {MILLIONS}M parameters, {RANKS} ranks, {bandwidth}/s",
            "a bare `all_reduce`",
            seconds["sync"],
            seconds["all_reduce"],
            goal=1.15,
        )


def over_link(rate: int, parameters: int, turns: int) -> dict[str, list[float]]:
    """Seconds of each side of `sync_times` on rank 0, over links of so many bits per second."""
    with TemporaryDirectory() as folder, Network(RANKS, LinkShape(bits_per_second=rate)) as network:
        found = Path(folder) / "seconds.json"
        words = (__file__, parameters, turns, found)
        network.run_ranks([sys.executable, *map(str, words)], os.getpid())
        seconds: dict[str, list[float]] = json.loads(found.read_text())
    return seconds


def main() -> None:
    """One rank: write its seconds if it is the first."""
    parameters, turns, found, rank, parent = sys.argv[1:]
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=RANKS)
    seconds = sync_times(int(parameters), int(turns))
    if rank == "0":
        Path(found).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
