"""Undoing a round of a trainer: a copy of what its round began with, and the way back to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.dtensor import copied
from adloco.distributed.placement.placement import Placement


@dataclass(frozen=True, kw_only=True)
class RoundStart:
    """Copies of the parameters and optimizer states of this process at the start of a round."""

    outers: Mapping[int, Any]
    """Trainer id -> a copy of `OuterSync.state_dict`, for trainers that have workers here."""
    workers: Mapping[int, Any]
    """Worker id -> a copy of `Worker.tensors`, for the workers here."""

    @staticmethod
    def of(
        trainers: Mapping[int, Trainer],
        workers: Mapping[int, Worker],
        placement: Placement,
        *,
        with_params: bool,
    ) -> "RoundStart":
        """Copy the state of a round that begins.

        Args:
            trainers: The living trainers, by id.
            workers: The workers in this process, by id.
            placement: Where all workers live.
            with_params: True if workers' parameters differ from their trainer's global ones.
        """
        return RoundStart(
            outers={
                trainer.id: _copied(trainer.outer.state_dict())
                for trainer in trainers.values()
                if placement.local(trainer.worker_ids)
            },
            workers={
                worker.id: _copied(worker.tensors(with_params=with_params))
                for worker in workers.values()
            },
        )

    def restore(
        self, trainer: Trainer, workers: Mapping[int, Worker], placement: Placement
    ) -> None:
        """Set a trainer and its workers here to what the round began with.

        Streams stay where they are, so that the round's data is not read again.
        """
        here = placement.local(trainer.worker_ids)
        if not here:
            return
        trainer.outer.load_state_dict(self.outers[trainer.id])
        trainer.outer.broadcast_all([workers[worker].replica for worker in here])
        for worker in here:
            workers[worker].load_tensors(self.workers[worker])


def _copied(value: Any) -> Any:
    """A nesting of dictionaries, lists and tuples with copies of its tensors, sharded as they are.

    Tensors of the global parameters that are in host memory are copied there.
    """
    if isinstance(value, Tensor):
        return copied(value, to_host=False)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_copied(item) for item in value)  # type: ignore[call-arg]
    return value
