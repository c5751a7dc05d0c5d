"""The parts of bench.py that need slow links: an outer sync against a bare all_reduce, and the
exchange of a sync by `adloco.distributed.all_to_all` against gloo's collectives.

Two ranks sit in network namespaces with a shaped link between them (`links_network.py`), which root
may make, and others where user namespaces are allowed.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from bench_pairs import Row, Seconds, chosen, in_turns
from links_network import (
    LinkShape,
    Network,
    die_with_parent,
    enter_private_namespaces,
    parse_bandwidth,
)
from sync import sync_times

from adloco.distributed.all_to_all import start_all_to_all, wait_for
from adloco.distributed.torch_versions import all_gather_single

RANKS, MILLIONS, LATER = 2, 10, 0.02


def outer_sync(*, quick: bool) -> Iterator[Row]:
    """An outer sync against all_reduce of as many bytes, over links of two bandwidths."""
    enter_private_namespaces()
    for bandwidth, turns in chosen([("1gbit", 12), ("100mbit", 4)], quick):
        seconds = over_link("sync", bandwidth, MILLIONS * 10**6, turns)
        yield Row.of(
            f"outer sync (Nesterov), {MILLIONS}M parameters, {RANKS} ranks, {bandwidth}/s",
            "a bare `all_reduce`",
            seconds["sync"],
            seconds["all_reduce"],
            goal=1.15,
        )


def exchange(*, quick: bool) -> Iterator[Row]:
    """Each rank sends a half of its bytes to the other one, and then the sum of its own half; one
    rank comes 20 ms later, as ranks do.
    """
    enter_private_namespaces()
    sizes = (64_000, 512_000, 3_500_000)
    cases = [(bandwidth, size, 7) for bandwidth in ("100mbit", "10mbit") for size in sizes]
    for bandwidth, size, turns in chosen(cases, quick):
        seconds = over_link("exchange", bandwidth, size, turns)
        yield Row.of(
            f"exchange of {size / 1e3:,.0f} kB between {RANKS} ranks, {bandwidth}/s",
            "gloo's `all_to_all` and `all_gather`",
            seconds["ours"],
            seconds["collectives"],
        )


def exchange_times(size: int, turns: int) -> Seconds:
    """Seconds of both ways to exchange so many bytes."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mine, theirs, both = (
        torch.zeros(part, dtype=torch.uint8) for part in (size // 2, size // 2, size)
    )
    halves = torch.split(both, len(mine))
    sizes = [0, len(mine)] if rank == 0 else [len(mine), 0]

    def collectives() -> None:
        time.sleep(LATER * rank)
        dist.all_to_all_single(theirs, mine, sizes, sizes)
        all_gather_single(both, mine)

    def ours() -> None:
        time.sleep(LATER * rank)
        wait_for(start_all_to_all([mine] * RANKS, [theirs] * RANKS, group))
        wait_for(start_all_to_all([mine] * RANKS, halves, group))

    return in_turns({"collectives": collectives, "ours": ours}, turns, meet=dist.barrier)


def over_link(what: str, bandwidth: str, size: int, turns: int) -> Seconds:
    """Seconds of each side on rank 0, over links of this bandwidth."""
    shape = LinkShape(bits_per_second=parse_bandwidth(bandwidth))
    with TemporaryDirectory() as folder, Network(RANKS, shape) as network:
        found = Path(folder) / "seconds.json"
        words = (__file__, what, size, turns, found)
        network.run_ranks([sys.executable, *map(str, words)], os.getpid())
        seconds: Seconds = json.loads(found.read_text())
    return seconds


def main() -> None:
    """One rank: write its seconds if it is the first."""
    what, size, turns, found, rank, parent = sys.argv[1:]
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=RANKS)
    times = sync_times if what == "sync" else exchange_times
    seconds = times(int(size), int(turns))
    if rank == "0":
        Path(found).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
