"""The gate before a sync: workers whose pseudo-gradients are far from the others' are left out.

All ranks judge by the same numbers: sketches of the pseudo-gradients (`trainer_distance`), which
are gathered from all workers before anything is summed.
"""

from collections.abc import Mapping

import torch

from adloco.algorithms.run_state import RunState
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.trainer_distance import sketch
from adloco.algorithms.worker import Worker
from adloco.distributed.placement.placement import Placement
from adloco.rules.gate import SMALLEST, Gate, Verdict


def judge_workers(
    gate: Gate, fragment: int, state: RunState, placement: Placement
) -> dict[int, Verdict]:
    """A verdict on each worker of the run before a fragment is synced, by worker id.

    The workers here that are left out go back to the global parameters, so that they have nothing
    to send. Called on all ranks.
    """
    trainers = state.trainers.values()
    if not gate.gate or all(len(trainer.worker_ids) < SMALLEST for trainer in trainers):
        return {}
    owners = {worker: trainer for trainer in trainers for worker in trainer.worker_ids}
    here = list(state.workers.values())
    rows = placement.map(
        lambda worker: _sketched(worker, owners[worker.id], fragment, placement),
        here,
        on_failure=lambda: None,
    )
    sketches = placement.gather({worker.id: row for worker, row in zip(here, rows, strict=True)})
    verdicts = {
        worker: verdict
        for trainer in trainers
        for worker, verdict in gate.judge(
            {worker: sketches[worker] for worker in trainer.worker_ids}
        ).items()
    }
    for worker in here:
        if verdicts[worker.id].left_out:
            owners[worker.id].outer.restart(fragment, worker.replica)
    return verdicts


@torch.no_grad()
def _sketched(worker: Worker, trainer: Trainer, fragment: int, placement: Placement) -> list[float]:
    """The sketch of a worker's pseudo-gradient, the difference of two sketches."""
    start, params = trainer.outer.fragment_of(fragment, worker.replica)
    if worker.engine.rank >= placement.shards:  # Further ranks of an island are replicas.
        start, params = [], []
    whole = sketch(start, placement.device) - sketch(params, placement.device)
    return worker.engine.sum(whole.tolist())


def weights_of(samples: Mapping[int, float], verdicts: Mapping[int, Verdict]) -> dict[int, float]:
    """The samples by which workers are weighted in a sync: 0 for those that are left out."""
    return {
        worker: 0.0 if worker in verdicts and verdicts[worker].left_out else count
        for worker, count in samples.items()
    }
