"""Evaluating trainers' global parameters, the work shared among the workers that stand at them and their ranks."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.placement.process import Placement

Share = Callable[[nn.Module, int, int], tuple[float, float]]
"""(model, part, parts) -> (sum, count) over the part-th of `parts` shares of the evaluation set.

It must call the model as often for each part: a sharded one takes all ranks of its island.
"""


def evaluate(trainers: Mapping[int, Trainer], workers: Mapping[int, Worker], placement: Placement, share: Share) -> dict[int, float]:
    """Mean of a quantity for each trainer. workers: those that live here."""
    places = {worker: (index, len(trainer.worker_ids)) for trainer in trainers.values() for index, worker in enumerate(trainer.worker_ids)}
    ranks = placement.ranks_per_worker

    def run(worker: Worker) -> list[float]:
        index, count = places[worker.id]
        worker.model.eval()
        with torch.no_grad():
            part = share(worker.model, index * ranks + worker.engine.rank, count * ranks)
        worker.engine.after_evaluation()
        return worker.engine.sum(part)

    results = placement.map(run, list(workers.values()), on_failure=lambda: None)
    gathered = placement.gather(dict(zip(workers, results, strict=True)))
    sums = {trainer.id: [gathered[worker] for worker in trainer.worker_ids] for trainer in trainers.values()}
    return {trainer: sum(row[0] for row in rows) / sum(row[1] for row in rows) for trainer, rows in sums.items()}
