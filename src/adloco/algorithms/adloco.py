"""AdLoCo (arXiv 2508.18182): a run, from its sections to rounds. The algorithm is in `round.py`.

With one trainer and a constant batch this is DiLoCo; with a plain mean as the outer step, LocalSGD;
with one worker, plain training.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from adloco.algorithms.building import build_workers, check_sections
from adloco.algorithms.evaluation import Share, evaluate
from adloco.algorithms.merging import Merging
from adloco.algorithms.method import Batching, Execution, Method, Problem
from adloco.algorithms.model_state import Replica
from adloco.algorithms.optimizers import InnerFactory, check_shards
from adloco.algorithms.outer_sync import OuterSync, Syncing
from adloco.algorithms.planning import Planner
from adloco.algorithms.reports import RoundReport
from adloco.algorithms.round import Phase, Round, RoundParts, average_replicas
from adloco.algorithms.run_state import RunState
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.comm.metered import SyncMeter
from adloco.distributed.parallel.layers import layers
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes
from adloco.errors import require
from adloco.rules.controller import BatchController
from adloco.rules.learning_rate import LearningRate


class AdLoCo:
    """A run: trainers x workers, trained round by round with `rounds`.

    Args:
        problem: Model, loss and data; at least one data stream for each worker.
        method: Trainers, workers and rounds.
        inner: Builds a worker's optimizers from its model.
        syncing: The outer optimizer, and how pseudo-gradients cross.
        batching: How batches are decided and carried out; a constant batch by default.
        merging: Which trainers merge; none by default.
        learning_rate: A schedule over the inner optimizers' own rates, in tokens.
        execution: Mixed precision, compilation, the seed of dropout.
        placement: Where workers live; this process by default.

    Raises:
        ValueError: For settings that cannot work together, in one sentence.
    """

    def __init__(
        self,
        problem: Problem,
        method: Method,
        *,
        inner: InnerFactory,
        syncing: Syncing,
        batching: Batching | None = None,
        merging: Merging | None = None,
        learning_rate: LearningRate | None = None,
        execution: Execution | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.method = method
        self.placement = placement or OneProcess()
        self._syncing = syncing
        self._batching = batching or Batching()
        execution = execution or Execution()
        check_sections(problem, method, self._batching, learning_rate, self.placement)
        workers = build_workers(
            problem,
            method,
            inner=inner,
            syncing=syncing,
            batching=self._batching,
            execution=execution,
            placement=self.placement,
        )
        first = next(iter(workers.values()))
        params = first.replica.params  # Sharded ones have the size of the whole.
        self.num_parameters = sum(tensor.numel() for tensor in params)
        self._start = Replica.of(first.model, with_residuals=False, on_host=False)
        self._fragments = syncing.streaming.cut(layers(first.model), method.sync_every)
        self.state = RunState(workers=workers, trainers={})
        """Trainers, workers and counters."""
        for trainer in range(method.num_trainers):
            begin = trainer * method.workers_per_trainer
            ids = range(begin, begin + method.workers_per_trainer)
            self.state.trainers[trainer] = self._new_trainer(trainer, ids)
        outers = [trainer.outer.optimizer for trainer in self.state.trainers.values()]
        optimizers = [*first.optimizers, *(outer for outer in outers if outer)]
        check_shards(optimizers, self.placement.shards)
        self._bytes_before = self.placement.total_bytes()
        self._parts = RoundParts(
            planner=Planner(
                batching=self._batching,
                learning_rate=learning_rate,
                tokens_per_sample=problem.tokens_per_sample,
                ranks=self.placement.ranks_per_worker,
            ),
            batching=self._batching,
            syncing=syncing,
            merging=merging or Merging(),
            placement=self.placement,
            meter=SyncMeter(self.placement.ranks_per_worker, execution.clock),
            clock=execution.clock,
            base_rate=first.base_rates[0][0],
            model_bytes=sum(tensor.numel() * tensor.element_size() for tensor in params),
            bytes_handed=self._bytes_handed,
        )
        self._round: Round | None = None

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run this many rounds, or fewer if `stop` is called."""
        for _ in range(count):
            report = self.round()
            if report is None:
                return
            yield report

    def round(
        self, inner_steps: int | None = None, phase: Phase = nullcontext, *, last: bool = False
    ) -> RoundReport | None:
        """Run one round, or what is left of it; None if `stop` was called.

        Args:
            inner_steps: H of this round; None: `method.sync_every`.
            phase: Entered for "inner_steps" and for "sync", to measure them.
            last: Average diverged replicas at the end.
        """
        if self._round is None:
            self._round = Round(self.state, self._parts, inner_steps or self.method.sync_every)
        report = self._round.run(phase, last=last)
        if report is not None:
            self._round = None
        return report

    def stop(self) -> None:
        """End the round after the inner steps in progress; from any thread or signal handler.

        The state can then be saved and resumed. A fragment in flight arrives first.
        """
        self._parts.halted.set()

    @property
    def trainers(self) -> dict[int, Trainer]:
        """The living ones, by id."""
        return self.state.trainers

    @property
    def workers(self) -> Mapping[int, Worker]:
        """Workers that live in this process, by id."""
        return self.state.workers

    @property
    def samples_per_inner_step(self) -> int:
        """Samples that one inner step takes over all trainers, with the batches now in force."""
        state = self.state
        return self._parts.planner.samples_per_inner_step(state.trainers, state.speeds)

    def average_replicas(self) -> None:
        """Make the workers' mean each trainer's model, where syncs have left workers diverged.

        Called on all ranks, between rounds. The mean is weighted by the last round's samples.
        """
        require(not self.state.in_round, "a round is in progress; average replicas between rounds")
        average_replicas(self.state, self._parts)

    def model(self, trainer: int) -> nn.Module:
        """A model with the trainer's global parameters, between rounds.

        Training goes on from it: copy it before you change it.
        """
        state = self.state
        require(
            not state.in_round, "a round is in progress, and workers differ; ask between rounds"
        )
        require(
            not state.diverged,
            "syncs have left the workers diverged; call average_replicas() first",
        )
        living = sorted(state.trainers)
        require(trainer in living, f"there is no trainer {trainer}; living ones are {living}")
        return state.workers[state.trainers[trainer].worker_ids[0]].model

    def evaluate(self, share: Share) -> dict[int, list[float]]:
        """Means of quantities for each trainer's global parameters, between rounds.

        The work is shared among the trainer's workers.
        """
        state = self.state
        require(
            not state.in_round,
            "a round is in progress, and workers differ; evaluate between rounds",
        )
        return evaluate(
            state.trainers, state.workers, self.placement, share, diverged=state.diverged
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit for bit, between rounds or, after `stop`, within one.

        Called on all ranks; complete on rank 0. Tensors are the live ones.
        """
        return self.state.state_dict(self.placement) | {"bytes": list(self._bytes_handed())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Called on all ranks."""
        self.state.load_state_dict(
            state, self.placement, lambda trainer: self._new_trainer(trainer, range(0))
        )
        self._bytes_before = self.placement.total_bytes() - Bytes(*state["bytes"])
        self._parts.halted.clear()
        self._round = Round(self.state, self._parts, 0) if self.state.in_round else None

    def _bytes_handed(self) -> Bytes:
        """Bytes of all ranks since the run began."""
        return self.placement.total_bytes() - self._bytes_before

    def _new_trainer(self, trainer: int, worker_ids: range) -> Trainer:
        outer = OuterSync(self._start, self._syncing, self._fragments)
        controller = BatchController(self._batching.rule, self._batching.guards)
        return Trainer(trainer, outer, controller, worker_ids)
