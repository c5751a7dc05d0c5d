"""How long do two ranks take to swap tensors over a slow link: by gloo's collectives, and by
`adloco.distributed.all_to_all`? The ranks sit in two network namespaces with a shaped link
between them (`links_network.py`).

    .venv/bin/python benchmarks/links_exchange.py [--bandwidth 10mbit]

An exchange is what a sync does: each rank sends a half of its bytes to the other one, and then the
sum of its own half. The table has medians in seconds, beside the time of the bytes at the link's
rate in both directions at once. One rank comes 20 ms later, as ranks do.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from links_network import (
    DEVICE,
    LinkShape,
    Network,
    address,
    enter_private_namespaces,
    parse_bandwidth,
)
from torch import Tensor

from adloco.distributed.all_to_all import start_all_to_all, wait_for
from adloco.distributed.torch_versions import all_gather_single

SIZES, REPEATS, LATER = (64_000, 512_000, 3_500_000), 7, 0.02
PAYLOAD = 1448 / 1514
"""Part of a full packet on the link that is not headers."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", default="10mbit")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    known = parser.parse_args()
    rate = parse_bandwidth(known.bandwidth)
    if known.rank is not None:
        measure(known.rank, PAYLOAD * rate / 8)
        return
    enter_private_namespaces()
    shape = LinkShape(bits_per_second=rate, latency_seconds=0.0, loss=0.0, mtu=1500)
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    with Network(2, shape) as network:
        command = [sys.executable, __file__, "--bandwidth", known.bandwidth, "--rank"]
        ranks = [
            network.start(rank, [*command, str(rank)], os.environ | meeting, sys.stderr.buffer)
            for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


def measure(rank: int, bytes_per_second: float) -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None

    def collectives(mine: Tensor, theirs: Tensor, both: Tensor) -> None:
        sizes = [0, len(mine)] if rank == 0 else [len(mine), 0]
        dist.all_to_all_single(theirs, mine, sizes, sizes)
        all_gather_single(both, mine)

    def swaps(mine: Tensor, theirs: Tensor, both: Tensor) -> None:
        wait_for(start_all_to_all([mine] * 2, [theirs] * 2, group))
        wait_for(start_all_to_all([mine] * 2, torch.split(both, len(mine)), group))

    if rank == 0:
        print(f"{'bytes':>9}  {'link':>6}  {'collectives':>11}  {'all_to_all':>10}", flush=True)
    for size in SIZES:
        found = [timed(function, rank, size) for function in (collectives, swaps)]
        if rank == 0:
            link = size / bytes_per_second
            print(f"{size:>9,}  {link:6.2f}  {found[0]:11.2f}  {found[1]:10.2f}", flush=True)
    dist.destroy_process_group()


def timed(function: Callable[[Tensor, Tensor, Tensor], None], rank: int, size: int) -> float:
    """Median seconds of an exchange, from the time at which both ranks are there."""
    seconds = []
    for _ in range(REPEATS):
        mine, theirs, both = (
            torch.zeros(part, dtype=torch.uint8) for part in (size // 2, size // 2, size)
        )
        dist.barrier()
        time.sleep(LATER * rank)
        began = time.monotonic()
        function(mine, theirs, both)
        seconds.append(time.monotonic() - began - (LATER if rank == 0 else 0.0))
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
