"""The gate before a sync: workers whose pseudo-gradients are far from the others' are left out.

All ranks judge by the same numbers: sketches of the pseudo-gradients (`trainer_distance`), which
are gathered from all workers before anything is summed.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from adloco.algorithms.model_state import copy_all
from adloco.algorithms.reports import RoundReport
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Stage, Weights
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.trainer_distance import sketch
from adloco.algorithms.worker import Worker
from adloco.distributed.placement.placement import Placement
from adloco.lab.gate.option import SMALLEST, Gate, Verdict
from adloco.rules.sync_schedule import SyncEvent


class GateStage(Stage):
    """Gives workers whose pseudo-gradients are far from the others' no weight in a sync."""

    key = Gate.key

    def __init__(self, gate: Gate, parts: RoundParts, state: RunState) -> None:
        self._gate, self._state, self._placement = gate, state, parts.placement
        self._islands = parts.islands
        self._verdicts: dict[int, list[Verdict]] = {}
        """The verdicts on each worker in the round, by id."""

    def begin_round(self) -> None:
        self._verdicts = {}

    def weights(self, event: SyncEvent, weights: Weights) -> Weights:
        verdicts = self._judge(event.fragment)
        for worker, verdict in verdicts.items():
            self._verdicts.setdefault(worker, []).append(verdict)
        return {
            worker: 0.0 if worker in verdicts and verdicts[worker].left_out else weight
            for worker, weight in weights.items()
        }

    def _judge(self, fragment: int) -> dict[int, Verdict]:
        """A verdict on each worker of the run before a fragment is synced, by worker id.

        The workers here that are left out go back to the global parameters, so that they have
        nothing to send.
        """
        state, placement = self._state, self._placement
        trainers = state.trainers.values()
        if all(len(trainer.worker_ids) < SMALLEST for trainer in trainers):
            return {}
        owners = {worker: trainer for trainer in trainers for worker in trainer.worker_ids}
        here = list(state.workers.values())
        rows = placement.map(
            lambda worker: _sketched(worker, owners[worker.id], fragment, placement), here
        )
        sketches = placement.gather(
            {worker.id: row for worker, row in zip(here, rows, strict=True)}
        )
        # Islands with texts of their own have other gradients, which is no fault.
        compared: dict[tuple[int, int], dict[int, list[float]]] = {}
        for number, trainer in owners.items():
            alike = compared.setdefault((trainer.id, self._islands[number]), {})
            alike[number] = sketches[number]
        verdicts: dict[int, Verdict] = {}
        for vectors in compared.values():
            verdicts |= self._gate.judge(vectors)
        for worker in here:
            if verdicts[worker.id].left_out:
                copy_all(*_of_fragment(worker, owners[worker.id], fragment))
        return verdicts

    def report(self, report: RoundReport) -> RoundReport:
        workers = [
            replace(row, more={**row.more, **self._said(row.worker)}) for row in report.workers
        ]
        return replace(report, workers=tuple(workers))

    def _said(self, worker: int) -> Mapping[str, Any]:
        """Count how often it was left out; of several fragments, the norm that is furthest from the
        median's and the lowest cosine.
        """
        verdicts = self._verdicts.get(worker, ())
        norms = [verdict.relative_norm for verdict in verdicts if verdict.relative_norm is not None]
        cosines = [verdict.cosine for verdict in verdicts if verdict.cosine is not None]
        furthest = max(norms, key=lambda norm: max(norm, 1 / max(norm, 1e-30)), default=None)
        return {
            "syncs_left_out": sum(verdict.left_out for verdict in verdicts),
            "relative_norm": furthest,
            "cosine_with_others": min(cosines, default=None),
        }

    def numbers(self) -> Any:
        return {
            str(worker): [asdict(verdict) for verdict in verdicts]
            for worker, verdicts in self._verdicts.items()
        }

    def load_numbers(self, numbers: Any) -> None:
        self._verdicts = {
            int(worker): [Verdict(**verdict) for verdict in verdicts]
            for worker, verdicts in numbers.items()
        }


@torch.no_grad()
def _sketched(worker: Worker, trainer: Trainer, fragment: int, placement: Placement) -> list[float]:
    """The sketch of a worker's pseudo-gradient, the difference of two sketches."""
    start, params = _of_fragment(worker, trainer, fragment)
    start = [one.to(own.device, own.dtype) for one, own in zip(start, params, strict=True)]
    if worker.engine.rank >= placement.shards:  # Further ranks of an island are replicas.
        start, params = [], []
    whole = sketch(start, placement.device) - sketch(params, placement.device)
    return worker.engine.sum(whole.tolist())


def _of_fragment(
    worker: Worker, trainer: Trainer, fragment: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The global parameters of a fragment, and a worker's own."""
    outer, own = trainer.outer, worker.replica.params
    indices = outer.fragments[fragment]
    return [outer.global_params[index] for index in indices], [own[index] for index in indices]
