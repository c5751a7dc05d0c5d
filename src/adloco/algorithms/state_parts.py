"""The parts of a run's state, each of which is written, read and sent by itself.

`run` has what every process needs: counters, and the plain numbers of all trainers and workers.
`trainer-N` has the tensors of a trainer's outer state, and `worker-N` those of a worker. Only the
processes that serve the trainer or the worker need them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from adloco.errors import require

if TYPE_CHECKING:  # They import torch, which commands that only list checkpoints do without.
    from adloco.algorithms.method import Method
    from adloco.distributed.placement.placement import Placement
    from adloco.rules.sync_schedule import Streaming

RUN = "run"


def trainer_part(trainer: int) -> str:
    """Name of the part with the tensors of a trainer."""
    return f"trainer-{trainer}"


def worker_part(worker: int) -> str:
    """Name of the part with the tensors of a worker."""
    return f"worker-{worker}"


def run_part(state: Mapping[str, Any], method: Method, streaming: Streaming) -> Mapping[str, Any]:
    """The part `run` of a state that a run with these settings can load.

    Raises:
        ValueError: The state is not complete, or it has other trainers or workers, whose rest would
            be lost, or is of a round in which other fragments were sent before.
    """
    require_parts(state, [RUN])
    numbers: Mapping[str, Any] = state[RUN]
    own = str(streaming)
    workers, trainers = {*map(int, numbers["workers"])}, {*workers_of(numbers)}
    require(
        {*method.living_workers} <= workers <= {*range(method.num_workers)}
        and trainers <= {*range(method.num_trainers)},
        f"the state has trainers {sorted(trainers)} and workers {sorted(workers)}, and this run "
        f"has {method.num_trainers} x {method.workers_per_trainer} workers; give the num_trainers "
        "and workers_per_trainer with which it was saved, and leave workers out by method.dropped",
    )
    saved = numbers.get("streaming", own)  # Checkpoints of 2026-11-29 and before have none.
    require(
        not numbers["round_steps"] or saved == own,
        f"the state was saved within a round, with {saved}, whose syncs come after other steps; "
        "give the same, or save between rounds",
    )
    return numbers


def require_parts(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError unless a state has these parts."""
    for name in names:
        require(
            name in state,
            f"the state is not complete, it has no {name!r}; save state_dict() on rank 0, where it "
            "is complete, and load that on all ranks",
        )


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
