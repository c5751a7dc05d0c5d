"""The part of bench.py that needs slow links: an outer sync against a bare all_reduce.

Two ranks sit in network namespaces with a shaped link between them (`links_network.py`), which root
may make, and others where user namespaces are allowed.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from bench_pairs import Row, chosen
from bench_ranks import RANKS, sync_times
from links_network import (
    LinkShape,
    Network,
    die_with_parent,
    enter_private_namespaces,
    parse_bandwidth,
)

MILLIONS = 10


def outer_sync(*, quick: bool) -> Iterator[Row]:
    """An outer sync against all_reduce of as many bytes, over links of two bandwidths."""
    enter_private_namespaces()
    for bandwidth, turns in chosen([("1gbit", 12), ("100mbit", 4)], quick):
        shape = LinkShape(bits_per_second=parse_bandwidth(bandwidth))
        with TemporaryDirectory() as folder, Network(RANKS, shape) as network:
            found = Path(folder) / "seconds.json"
            network.run_ranks([sys.executable, __file__, str(turns), str(found)])
            seconds = json.loads(found.read_text())
        yield Row.of(
            f"outer sync (Nesterov), {MILLIONS}M parameters, {RANKS} ranks, {bandwidth}/s",
            "a bare `all_reduce`",
            seconds["sync"],
            seconds["all_reduce"],
            goal=1.15,
        )


def main() -> None:
    """One rank: write its seconds if it is the first."""
    turns, found = sys.argv[1:]
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = sync_times(MILLIONS * 10**6, int(turns))
    if dist.get_rank() == 0:
        Path(found).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
