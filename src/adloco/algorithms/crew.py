"""The trainers of a run, and those of their workers that live in this process: how they train, sync and settle together."""

from collections.abc import Callable, Iterator, Mapping
from threading import Event
from typing import Any

from adloco.algorithms.reports import WorkerRound
from adloco.algorithms.streaming import FragmentSyncs, Served
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import RoundTask, Worker
from adloco.distributed.placement.one_process import Placement
from adloco.rules.sync_schedule import Streaming, SyncEvent


class Crew:
    """Trainers and workers between the decisions of a round. All methods are called on all ranks, in the same order."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        trainers: Mapping[int, Trainer],
        streaming: Streaming,
        placement: Placement,
        clock: Callable[[], float],
    ) -> None:
        """workers: those of this process. clock: seconds from some fixed point."""
        self.workers = dict(workers)
        self.trainers = dict(trainers)
        self._syncs = FragmentSyncs(streaming, placement)
        self.apart = False
        """Whether workers stand apart from their trainer's global parameters between rounds, as streaming and a step ahead leave them."""
        self._streaming = streaming
        self._samples: dict[int, float] = {}
        """Of every worker of the run, in the round that ended last."""
        self._placement = placement
        self._clock = clock
        self._failed = Event()
        self._seconds = 0.0

    def begin_round(self) -> None:
        """Forget the records of the last round."""
        self._seconds = 0.0
        for worker in self.workers.values():
            worker.begin_round()

    def train(self, tasks: Mapping[int, RoundTask], until: int, halted: Event | None) -> None:
        """Inner steps of all workers up to that one of the round, or until halted between two of them. None: nothing but a failure halts them."""

        def run(worker: Worker) -> None:
            worker.advance(tasks[worker.id], until, halted or self._failed)

        def fail() -> None:
            (halted or self._failed).set()

        began = self._clock()
        try:
            # All of them, also those that are there already: how many run at once must not change how they compute.
            self._placement.map(run, list(self.workers.values()), on_failure=fail)
        except BaseException:
            (halted or self._failed).clear()
            raise
        self._seconds += self._clock() - began

    def agree(self, halted: bool) -> bool:
        """Whether any rank is halted. Waits for all of them."""
        began = self._clock()
        answer = self._placement.any(halted)
        self._syncs.stand_still(self._clock() - began)
        return answer

    def sync(self, event: SyncEvent, tasks: Mapping[int, RoundTask]) -> None:
        """Send or receive a fragment."""
        self._syncs.handle(event, [served for _, _, served in self._served(_batches(tasks))])
        for trainer, numbers in self._syncs.take().items():
            for worker, own in zip(self._here(self.trainers[trainer]), numbers, strict=True):
                worker.count_sync(own)

    def end_round(self, tasks: Mapping[int, RoundTask]) -> dict[int, WorkerRound]:
        """What every worker of the run did in the round. Averages buffers first."""
        for trainer, workers, served in self._served(_batches(tasks)):
            trainer.average_buffers(workers, served.weights, served.comm)
        self.apart = self._streaming.drifts or any(trainer.outer.steps_ahead and len(trainer.worker_ids) > 1 for trainer in self.trainers.values())
        longest = max(worker.busy_seconds for worker in self.workers.values())
        turns = max(1.0, self._seconds / max(longest, 1e-9))
        rows = self._placement.gather({worker.id: WorkerRound.of(worker, turns).to_numbers() for worker in self.workers.values()})
        done = {worker: WorkerRound.from_numbers(row) for worker, row in rows.items()}
        self._samples = {worker: row.samples for worker, row in done.items()}
        return done

    def settle(self) -> None:
        """Bring each trainer's workers together at their mean, weighted by the last round's samples, if they stand apart."""
        if self.apart:
            for trainer, workers, served in self._served(self._samples):
                trainer.outer.average(served.params, served.weights, served.comm)
                trainer.broadcast(workers)
        self.apart = False

    def restore(self, trainers: Mapping[int, Trainer], workers: Mapping[str, Mapping[str, Any]], apart: bool) -> None:
        """Go on with these trainers and states of workers."""
        self._syncs.forget()
        self.trainers, self.apart = dict(trainers), apart
        self._samples = {int(worker): state["round_samples"] for worker, state in workers.items()}
        for trainer in self.trainers.values():
            trainer.broadcast(self._here(trainer))
        for worker in self.workers.values():
            worker.load_state_dict(workers[str(worker.id)])

    def _served(self, samples: Mapping[int, float]) -> Iterator[tuple[Trainer, list[Worker], Served]]:
        """The trainers that have workers here, these workers, and what is synced of them."""
        # On all ranks, as process groups may be made.
        comms = {trainer.id: self._placement.comm(trainer.worker_ids) for trainer in self.trainers.values()}
        for trainer in self.trainers.values():
            workers = self._here(trainer)
            if workers:
                yield trainer, workers, trainer.served(workers, samples, comms[trainer.id])

    def _here(self, trainer: Trainer) -> list[Worker]:
        return [self.workers[worker] for worker in self._placement.local(trainer.worker_ids)]


def _batches(tasks: Mapping[int, RoundTask]) -> dict[int, int]:
    return {worker: task.plan.worker_batch for worker, task in tasks.items()}
