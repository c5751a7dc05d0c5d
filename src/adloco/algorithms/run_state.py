"""The state of a run: its trainers, its workers and its counters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from adloco.algorithms.model_state import Replica
from adloco.algorithms.stage import Stage, Weights
from adloco.algorithms.state_parts import RUN, trainer_part, worker_part, workers_of
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.comm.comm import Comm
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.parallel.layers import free_gathered
from adloco.distributed.placement.placement import Placement


@dataclass(kw_only=True)
class RunState:
    """Everything that changes while a run trains. Counters are totals since its start."""

    workers: Mapping[int, Worker]
    """The workers in this process, by id."""
    trainers: dict[int, Trainer]
    """The living trainers (those that no merge has absorbed), by id."""
    rounds_done: int = 0
    """Complete rounds."""
    samples: int = 0
    """Samples trained on in complete rounds, by all workers."""
    inner_steps: int = 0
    """Inner steps of each worker in complete rounds."""
    syncs: int = 0
    """Complete rounds in which workers exchanged parameters."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Samples per second of each worker of the run, by id, as `Shares.update` keeps them."""
    pass_limit: int = 0
    """Cap on micro-batches, in samples, since memory ran out; 0: none."""
    round_steps: int = 0
    """Inner steps of the round in progress; 0 between rounds."""
    sync_every: int = 0
    """H of the newest round when it began, which has fewer inner steps if a budget ends it."""
    final_samples: int = 0
    """Samples of the last of them over all trainers, where the budget ends; 0: as many as of the
    others."""
    events_done: int = 0
    """Events of the sync schedule (fragments sent or received) done in the round in progress."""
    diverged: bool = False
    """True if workers' parameters differ from their trainer's global ones between rounds."""
    last_batches: dict[int, Sequence[int]] = field(default_factory=dict)
    """Samples of each inner step of every worker of the run, by id: in the last round, if it is
    complete; in the round in progress those steps that were taken before the checkpoint that was
    loaded."""
    planned: dict[int, float] = field(default_factory=dict)
    """Samples of every worker of the run in the round in progress as planned, by id; empty if this
    process has not trained in it."""
    stages: Sequence[Stage] = ()
    """What acts between rounds, in the order in which it is called."""

    @property
    def in_round(self) -> bool:
        """True if a round has begun and not ended."""
        return self.round_steps > 0

    @property
    def begun_steps(self) -> int:
        """Inner steps that this process's furthest worker has taken in the round in progress."""
        taken = max((worker.inner_step for worker in self.workers.values()), default=0)
        return taken if self.in_round else 0

    @property
    def begun_samples(self) -> int:
        """Samples that this process's workers have trained on in the round in progress."""
        here = sum(worker.round.samples for worker in self.workers.values())
        return here if self.in_round else 0

    @property
    def samples_so_far(self) -> int:
        """Samples trained on, those of the round in progress included: workers elsewhere are taken
        to have come as far in it as those here.
        """
        planned = self.planned  # A view asks in a thread of its own.
        here = sum(planned.get(worker, 0.0) for worker in self.workers)
        if not self.in_round or not here:
            return self.saved_samples
        return self.samples + round(self.begun_samples * sum(planned.values()) / here)

    @property
    def saved_samples(self) -> int:
        """Samples trained on at the checkpoint that was loaded, all workers' in its round."""
        return self.samples + (sum(map(sum, self.last_batches.values())) if self.in_round else 0)

    @property
    def will_sync(self) -> bool:
        """True if a trainer has workers that exchange parameters in a round."""
        return any(len(trainer.worker_ids) > 1 for trainer in self.trainers.values())

    def synced(
        self, placement: Placement, weights: Weights
    ) -> Iterator[tuple[Trainer, list[Replica], list[float], Comm]]:
        """Give what a sync needs, for each trainer that has workers in this process.

        Called on all ranks.

        Yields:
            (trainer, replicas of its workers here, their shares of the weights of all its workers,
            its communicator).
        """
        # Making a communicator can make process groups, which takes all ranks. So all are made
        # before the first is used.
        comms = {
            trainer.id: placement.comm(trainer.worker_ids) for trainer in self.trainers.values()
        }
        for trainer in self.trainers.values():
            if here := placement.local(trainer.worker_ids):
                replicas = [self.workers[worker].replica for worker in here]
                total = sum(weights[worker] for worker in trainer.worker_ids)
                shares = [weights[worker] / total for worker in here]
                yield trainer, replicas, shares, comms[trainer.id]

    def skip_samples(self, count: int) -> None:
        """Leave out the next samples of each worker's stream; they do not count as trained on."""
        for worker in self.workers.values():
            worker.position += count

    def require_finite(self, placement: Placement) -> None:
        """Raise NonFiniteLossError unless every trainer's global parameters and outer optimizer
        state are finite. Called on all ranks; workers check their own as they train.
        """
        for trainer in self.trainers.values():
            if here := placement.local(trainer.worker_ids):
                worker, outer = self.workers[here[0]], trainer.outer
                replace(worker.replica, params=outer.global_params).require_finite(
                    f"the global parameters of trainer {trainer.id}",
                    worker.engine.sum,
                    [outer.optimizer] if outer.optimizer else [],
                )

    def load_global(self, placement: Placement) -> None:
        """Set all workers to the global parameters of their trainers. Called between rounds."""
        for worker in self.workers.values():
            free_gathered(worker.model)
        for trainer in self.trainers.values():
            here = placement.local(trainer.worker_ids)
            trainer.outer.copy_all_to_workers([self.workers[worker].replica for worker in here])
        self.diverged = False

    def at_global(self, worker: Worker, trainer: Trainer) -> AbstractContextManager[object]:
        """A context in which a worker has its trainer's global parameters. Used between rounds."""
        tensors = trainer.outer.parameters()
        return worker.swapped_params(tensors) if self.diverged else nullcontext()

    def parts(self, placement: Placement, *, copy: bool) -> dict[str, Any]:
        """The state in host memory, by part; see `state_parts`. Called on all ranks.

        copy: Copies, which training does not change.

        Returns:
            On the first rank of each island: the parts of its workers, and of the trainers whose
            first worker it has; on rank 0 also `run`. Nothing on other ranks.
        """
        parts: dict[str, Any] = {
            trainer_part(trainer.id): {"outer": trainer.outer.state_dict()}
            for trainer in self.trainers.values()
            if placement.local(trainer.worker_ids[:1])
        }
        with_params = self.in_round or self.diverged
        for worker in self.workers.values():
            parts[worker_part(worker.id)] = {"inner": worker.tensors(with_params=with_params)}
        parts = gather_shards(parts, keep=placement.is_island_first, copy=copy)
        here = [(str(worker.id), worker.numbers()) for worker in self.workers.values()]
        workers = dict(placement.collect(here))
        if not placement.is_island_first:
            return {}
        numbers = {RUN: deepcopy(self._numbers(workers))} if placement.is_rank_zero else {}
        return numbers | parts

    def _numbers(self, workers: Mapping[str, Any]) -> dict[str, Any]:
        """The part `run`.

        workers: The numbers of all workers, by id.
        """
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "stages": {
                stage.key: own for stage in self.stages if (own := stage.numbers()) is not None
            },
            "speeds": {str(worker): speed for worker, speed in self.speeds.items()},
            "trainers": [trainer.numbers() for trainer in self.trainers.values()],
            "workers": dict(workers),
        }

    def load_parts(
        self, parts: Mapping[str, Any], placement: Placement, new_trainer: Callable[[int], Trainer]
    ) -> None:
        """Continue from the parts of a state. Called on all ranks.

        Args:
            parts: `run`, and at least what `local_parts` names.
            new_trainer: Makes a trainer with the given id, whose state is then loaded.
        """
        for trainer in self.trainers.values():
            trainer.outer.discard_in_flight()
        numbers = parts[RUN]
        self.planned = {}
        self.trainers = {}
        for saved in sorted(numbers["trainers"], key=lambda saved: int(saved["trainer"])):
            trainer = new_trainer(int(saved["trainer"]))
            trainer.load_numbers(saved)
            self.trainers[trainer.id] = trainer
        for trainer in self.trainers.values():
            if placement.local(trainer.worker_ids):
                trainer.outer.load_state_dict(parts[trainer_part(trainer.id)]["outer"])
        self.load_global(placement)
        self._load_numbers(numbers)
        for worker in self.workers.values():
            worker.load_numbers(numbers["workers"][str(worker.id)])
            worker.load_tensors(parts[worker_part(worker.id)]["inner"])
        for stage in self.stages:
            # An option that was switched on since then has nothing to continue from.
            if stage.key in numbers["stages"]:
                stage.load_numbers(numbers["stages"][stage.key])

    def _load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from the counters in the part `run`."""
        numbers = {"sync_every": 0, **numbers}  # Those of before 2026-11-30 lack it.
        vars(self).update({name: numbers[name] for name in COUNTERS})
        self.speeds = {int(worker): speed for worker, speed in numbers["speeds"].items()}
        # Those of workers that are dropped count in nothing.
        self.last_batches = {
            worker: numbers["workers"][str(worker)]["round"]["batches"]
            for ids in workers_of(numbers).values()
            for worker in ids
        }


COUNTERS = tuple(each.name for each in fields(RunState) if isinstance(each.default, int))
"""Plain numbers and flags of a run's state, which are saved as they are."""
