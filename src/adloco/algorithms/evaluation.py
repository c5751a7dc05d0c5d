"""Evaluation of trainers' global parameters, with the work split over their workers and ranks."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from adloco.algorithms.run_state import RunState
from adloco.algorithms.worker import Worker
from adloco.distributed.parallel.layers import free_gathered
from adloco.distributed.placement.placement import Placement

Share = Callable[[nn.Module, int, int], Sequence[float]]
"""(model, part, parts) -> sums over one part of the evaluation set.

The set is split into `parts` parts, and `part` is the number of one of them, from 0. The result has
the sum of one or more quantities, and last the number of summands. The function must call the model
equally often for every part, because all ranks of an island compute a sharded model together.
"""
Sums = list[float]
"""Sums of quantities over an evaluation set, and last the number of summands."""


def evaluate(
    state: RunState,
    placement: Placement,
    islands: Mapping[int, int],
    share_of: Callable[[int], Share],
) -> dict[int, dict[int, Sums]]:
    """Sums over each evaluation set, by trainer id and island. Called on all ranks, between
    rounds.

    Where workers' parameters differ from their trainers' global ones, these replace them while the
    model is evaluated.

    Args:
        islands: The island of each worker, by id: workers of one island share an evaluation set.
        share_of: Takes an island, and returns what evaluates a model on one part of its set.
    """
    trainers, workers = state.trainers, state.workers
    sharing: dict[tuple[int, int], list[int]] = {}
    """The workers that share a set, by trainer and island, in rising order."""
    for each in trainers.values():
        for worker in each.worker_ids:
            sharing.setdefault((each.id, islands[worker]), []).append(worker)
    places = {worker: place for place, among in sharing.items() for worker in among}
    ranks = placement.ranks_per_worker

    def run(worker: Worker) -> Sums:
        trainer, island = places[worker.id]
        among = sharing[trainer, island]
        worker.model.eval()
        with state.at_global(worker, trainers[trainer]), torch.no_grad():
            index = among.index(worker.id) * ranks + worker.engine.rank
            part = share_of(island)(worker.model, index, len(among) * ranks)
        free_gathered(worker.model)
        return worker.engine.sum(part)

    results = placement.map(run, list(workers.values()))
    gathered = placement.gather(dict(zip(workers, results, strict=True)))
    sums: dict[int, dict[int, Sums]] = {trainer: {} for trainer in trainers}
    for (trainer, island), among in sharing.items():
        sums[trainer][island] = total([gathered[worker] for worker in among])
    return sums


def total(sums: Sequence[Sums]) -> Sums:
    """The sums over several sets or parts together."""
    return [sum(column) for column in zip(*sums, strict=True)]


def means(sums: Sums) -> list[float]:
    """The mean of each quantity."""
    *quantities, count = sums
    return [quantity / count for quantity in quantities]
