"""Estimates the distance between trainers without sending a model.

Each trainer sends a sketch of its global parameters: each element is added with a random sign to
one of `BUCKETS` buckets. A sketch is linear, so that of a mean is the mean of the sketches, and its
squared norm is that of the whole vector in expectation (AMS sketch: Alon, Matias and Szegedy,
https://doi.org/10.1006/jcss.1997.1545). Sign and bucket of an element follow from its index in the
whole model, so shards add up to the sketch of the whole, and placements agree.
"""

import functools
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.device import to_device
from adloco.distributed.dtensor import first_element, local
from adloco.distributed.placement.placement import Placement
from adloco.rules.agreement import relative_distances

BUCKETS = 257
"""Buckets of a sketch. The standard error of a norm is 1 / sqrt(2 x BUCKETS) of it, 4.4%. A prime,
so that no row or column of a matrix has all its elements in one bucket.
"""
BLOCK = 1024 * BUCKETS
"""Elements after which the signs repeat, but all turned or not, and moved on by a number of
buckets: both are drawn for each block. If all blocks of a model are equal, the standard error is
6.2%.
"""
BLOCKS = 16
"""Blocks whose sums are computed at once."""


def trainer_distances(
    trainers: Mapping[int, Trainer], workers: Mapping[int, Worker], placement: Placement
) -> dict[int, float | None]:
    """Distance of each trainer's global parameters from the mean of all trainers', by trainer id.

    It is |x - mean| / |mean|, estimated from sketches; None for a single trainer. Called on all
    ranks.
    """
    if len(trainers) == 1:
        return dict.fromkeys(trainers)

    def numbers(trainer: Trainer) -> list[float]:
        engine = workers[placement.local(trainer.worker_ids)[0]].engine
        # Further ranks of an island are replicas.
        params = trainer.outer.global_params if engine.rank < placement.shards else []
        return engine.sum(sketch(params, placement.device).tolist())

    here = [trainer for trainer in trainers.values() if placement.local(trainer.worker_ids)]
    rows = {
        worker: row
        for trainer, row in zip(here, placement.map(numbers, here), strict=True)
        for worker in placement.local(trainer.worker_ids)
    }
    gathered = placement.gather(dict(sorted(rows.items())))
    sketches = [gathered[trainer.worker_ids[0]] for trainer in trainers.values()]
    return dict(zip(trainers, relative_distances(sketches), strict=True))


@torch.no_grad()
def sketch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sketch of all elements of these tensors; of sharded ones, of those on this rank.

    tensors: The parameters of a model, in its order.

    Returns:
        float64 of shape (BUCKETS,).
    """
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=device)
    elements = sum(tensor.numel() for tensor in tensors)
    # Some blocks at a time, in one memory: a device computes many elements in few operations.
    # A rank that is a further replica gives no tensors.
    window = total.new_zeros(min(BLOCKS, max(1, -(-elements // BLOCK))) * BLOCK)
    begin = first = 0  # Indices of the next tensor's first element, and of the window's.
    for tensor in tensors:
        values, index = local(tensor).flatten(), begin + first_element(tensor)
        while len(values):
            if index >= first + len(window):
                total += _in_buckets(window, first // BLOCK)
                window.zero_()
                first = index // BLOCK * BLOCK
            piece, values = values.tensor_split([first + len(window) - index])
            window[index - first :][: len(piece)] = piece
            index += len(piece)
        begin += tensor.numel()
    return total + _in_buckets(window, first // BLOCK)


def _in_buckets(window: Tensor, block: int) -> Tensor:
    """The buckets of the elements of neighbouring blocks, whose memory it changes.

    block: Number of the first of them.
    """
    rows = window.view(-1, BLOCK).mul_(_signs(window.device)).view(-1, BLOCK // BUCKETS, BUCKETS)
    turns = []
    for number in range(block, block + len(rows)):
        generator = random.Random(number)
        turns.append((generator.choice((-1, 1)), generator.randrange(BUCKETS)))
    sign, moved = to_device(torch.tensor(turns), window.device).T[..., None]
    places = (torch.arange(BUCKETS, device=window.device) - moved) % BUCKETS
    return rows.sum(1).mul_(sign).gather(1, places).sum(0)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """The signs of a block, as float64."""
    signs = random.Random(0).choices((-1.0, 1.0), k=BLOCK)
    return torch.tensor(signs, dtype=torch.float64, device=device)
