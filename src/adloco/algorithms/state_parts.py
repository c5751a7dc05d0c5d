"""The parts of a run's state, each of which is written, read and sent by itself.

`run` has what every process needs: counters, and the plain numbers of all trainers and workers.
`trainer-N` has the tensors of a trainer's outer state, and `worker-N` those of a worker. Only the
processes that serve the trainer or the worker need them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # It imports torch, which commands that only list checkpoints do without.
    from adloco.distributed.placement.placement import Placement

RUN = "run"


def trainer_part(trainer: int) -> str:
    """Name of the part with the tensors of a trainer."""
    return f"trainer-{trainer}"


def worker_part(worker: int) -> str:
    """Name of the part with the tensors of a worker."""
    return f"worker-{worker}"


def workers_of(numbers: Mapping[str, Any]) -> dict[int, list[int]]:
    """The workers of each trainer, by its id.

    numbers: The part `run`.
    """
    return {int(entry["trainer"]): list(entry["workers"]) for entry in numbers["trainers"]}


def of_workers(numbers: Mapping[str, Any], ids: Collection[int]) -> dict[str, Any]:
    """The part `run` with these workers alone, and with the trainers that have any of them.

    numbers: The part `run`.
    """
    trainers = [
        {**entry, "workers": [worker for worker in entry["workers"] if worker in ids]}
        for entry in numbers["trainers"]
    ]
    return {**numbers, "trainers": [entry for entry in trainers if entry["workers"]]}


def local_parts(numbers: Mapping[str, Any], placement: Placement) -> list[str]:
    """Names of the parts that this process needs, without `run`.

    numbers: The part `run`.
    """
    trainers = workers_of(numbers)
    here = {trainer: placement.local(workers) for trainer, workers in sorted(trainers.items())}
    workers = sorted(worker for ids in here.values() for worker in ids)
    return [
        *(trainer_part(trainer) for trainer in here if here[trainer]),
        *map(worker_part, workers),
    ]
