"""Evaluation of trainers' global parameters, with the work split over their workers and ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from adloco.algorithms.run_state import RunState
from adloco.algorithms.worker import Worker
from adloco.distributed.placement.placement import Placement

Share = Callable[[nn.Module, int, int], Sequence[float]]
"""(model, part, parts) -> sums over one part of the evaluation set.

The set is split into `parts` parts, and `part` is the number of one of them, from 0. The result has
the sum of one or more quantities, and last the number of summands. The function must call the model
equally often for every part, because all ranks of an island compute a sharded model together.
"""


def evaluate(state: RunState, placement: Placement, share: Share) -> dict[int, list[float]]:
    """The mean of each quantity over the evaluation set, by trainer id. Called on all ranks.

    Where workers' parameters differ from their trainers' global ones, these replace them while the
    model is evaluated.

    Args:
        state: The run's state, between rounds.
        placement: Where all workers live.
        share: Evaluates a model on one part of the evaluation set.
    """
    trainers, workers = state.trainers, state.workers
    places = {
        worker: (trainer, index)
        for trainer in trainers.values()
        for index, worker in enumerate(trainer.worker_ids)
    }
    ranks = placement.ranks_per_worker

    def run(worker: Worker) -> list[float]:
        trainer, index = places[worker.id]
        worker.model.eval()
        tensors = trainer.outer.parameters()
        live = worker.swapped_params(tensors) if state.diverged else nullcontext()
        with live, torch.no_grad():
            part = share(
                worker.model, index * ranks + worker.engine.rank, len(trainer.worker_ids) * ranks
            )
        worker.engine.after_evaluation()
        return worker.engine.sum(part)

    results = placement.map(run, list(workers.values()), on_failure=lambda: None)
    gathered = placement.gather(dict(zip(workers, results, strict=True)))
    sums = {
        trainer.id: [gathered[worker] for worker in trainer.worker_ids]
        for trainer in trainers.values()
    }
    totals = {
        trainer: [sum(column) for column in zip(*rows, strict=True)]
        for trainer, rows in sums.items()
    }
    return {
        trainer: [total / count for total in quantities]
        for trainer, (*quantities, count) in totals.items()
    }
