"""Exchanges through the memory of the CPU, which islands with GPUs have, give the same bits."""

import torch
from torch import Tensor

from adloco.distributed import all_to_all
from adloco.distributed.comm.buckets import Contributions
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int4 import Int4

copies: list[Tensor] = []


def exchanged(staged: bool) -> list[list[float]]:
    """Sums and a broadcast of three workers on two ranks."""
    if staged:
        copied = all_to_all.pinned_copy
        all_to_all.is_staged = lambda tensor, group: True
        all_to_all.pinned_copy = lambda tensor: copies.append(tensor) or copied(tensor)
    placement = place(3)
    here = placement.local(range(3))
    entries = [
        [
            torch.randn(size, generator=torch.Generator().manual_seed(7 * worker))
            for size in (5, 999)
        ]
        for worker in here
    ]
    comm, weights = placement.comm(range(3)), [1 / 3] * len(here)
    origin = [torch.zeros(5), torch.ones(999)]
    found = [comm.mean(entries, weights)]
    for wire in (None, Int1(), Int4()):
        given = Contributions(per_worker=entries, weights=weights, origin=origin, wire=wire)
        found.append([each.clone() for each in comm.start_mean(given, overlapped=True).wait()])
    found.append(comm.broadcast(entries[-1], 1, [0, 2]))
    assert bool(copies) == staged
    return [torch.cat(tensors).tolist() for tensors in found]


def test_the_same_bits_through_the_memory_of_the_cpu() -> None:
    plain, through = (run_on_ranks(exchanged, 2, staged) for staged in (False, True))
    assert plain == through
    assert plain[0] == plain[1]
