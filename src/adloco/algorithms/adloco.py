"""AdLoCo (arXiv 2508.18182): a run, from its sections to rounds. The algorithm is in `round.py`.

With one trainer and a constant batch, a run is DiLoCo. If the outer step is also the plain mean, it
is LocalSGD. If there is also only one worker, it is plain training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from torch import nn

from adloco.algorithms.building import build_workers, check_sections
from adloco.algorithms.evaluation import Share, Sums, evaluate, means, total
from adloco.algorithms.method import Batching, Execution, Merging, Method, Problem, Syncing
from adloco.algorithms.micro_batch_limit import SmallestOfAll
from adloco.algorithms.optimizers import InnerFactory, check_shards
from adloco.algorithms.outer_sync import OuterSync
from adloco.algorithms.planning import Planner
from adloco.algorithms.reports import RoundReport
from adloco.algorithms.round import Phase, Round
from adloco.algorithms.round_parts import RoundParts
from adloco.algorithms.run_state import RunState
from adloco.algorithms.stage import Option
from adloco.algorithms.state_parts import RUN, local_parts, of_workers, require_parts, run_part
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.launch.launcher import alone
from adloco.distributed.parallel.layers import layers
from adloco.distributed.placement.islands import island_of
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes
from adloco.dotted_path import load_object
from adloco.errors import require
from adloco.rules.controller import BatchController
from adloco.rules.learning_rate import LearningRate


class AdLoCo:
    """A run: trainers with workers each, trained round by round with `rounds`.

    Args:
        problem: The model, the loss and the data, with at least one stream for each worker.
        method: The numbers of trainers and workers, and the length of a round.
        inner: Builds a worker's inner optimizers from its model.
        syncing: The outer optimizer, and how pseudo-gradients are sent.
        batching: How batches are decided and cut up; None: a constant batch.
        merging: Which trainers merge, and what happens to what they own; None: none merge.
        learning_rate: A factor on the inner optimizers' own rates; None: their rates are constant.
        execution: Mixed precision, compilation and the seed; None: the defaults.
        options: What acts in the rounds besides, such as `Gate`.
        placement: Where the workers live, from `place`; None: in this process, where it is not one
            of several ranks.

    Raises:
        ValueError: The settings cannot work together.
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
        options: Sequence[Option] = (),
        placement: Placement | None = None,
    ) -> None:
        self.method = method
        self.placement = placement or alone()
        batching, merging = batching or Batching(), merging or Merging()
        execution = execution or Execution()
        given = problem, method, syncing, batching, merging, execution, self.placement
        kinds = Problem, Method, Syncing, Batching, Merging, Execution, Placement
        for one, kind in zip(given, kinds, strict=True):
            require(isinstance(one, kind), f"AdLoCo needs {kind.__name__}(...), got {type(one)}")
        check_sections(problem, method, batching, merging, learning_rate, self.placement)
        settings = InnerSettings(
            problem=problem,
            method=method,
            inner=inner,
            syncing=syncing,
            batching=batching,
            execution=execution,
            device=self.placement.device,
        )
        workers = build_workers(settings, self.placement)
        first = next(iter(workers.values()))
        # A sharded parameter has the size of the whole one here.
        params = first.replica.params
        self.num_parameters = sum(tensor.numel() for tensor in params)
        self._start = first.replica
        self._parts = RoundParts(
            planner=Planner(
                batching=batching,
                learning_rate=learning_rate,
                tokens_per_sample=problem.tokens_per_sample,
                ranks=self.placement.ranks_per_worker,
                method=method,
            ),
            batching=batching,
            syncing=syncing,
            merging=merging,
            placement=self.placement,
            clock=execution.clock,
            base_rate=first.base_rates[0][0],
            model_bytes=sum(tensor.numel() * tensor.element_size() for tensor in params),
            bytes_handed=self._bytes_handed,
            islands={
                worker: island_of(worker, problem.data.num_streams, problem.islands)
                for worker in range(method.num_workers)
            },
        )
        self._state, self._loaded = RunState(workers=workers, trainers={}), True
        self.state.stages = [
            SmallestOfAll(self._parts, self.state),
            *(
                load_object(option.stage)(option, self._parts, self.state)
                for option in options
                if option.active
            ),
        ]
        self._fragments = syncing.streaming.cut(layers(first.model), method.sync_every)
        for trainer in range(method.num_trainers):
            begin = trainer * method.workers_per_trainer
            ids = range(begin, begin + method.workers_per_trainer)
            if living := [worker for worker in ids if worker in method.living_workers]:
                self.state.trainers[trainer] = self._new_trainer(trainer, living)
        outers = (trainer.outer.optimizer for trainer in self.state.trainers.values())
        check_shards([*first.optimizers, *filter(None, outers)], self.placement.shards)
        self._bytes_before = self.placement.total_bytes()

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run this many rounds, or fewer if `stop` is called; yield the report of each."""
        for _ in range(count):
            report = self.round()
            if report is None:
                return
            yield report

    def round(
        self,
        inner_steps: int | None = None,
        phase: Phase = nullcontext,
        *,
        final_samples: int = 0,
    ) -> RoundReport | None:
        """Run one round, or the rest of a round that was stopped.

        Args:
            inner_steps: H of a new round; None: `sync_every`.
            phase: Called with "inner_steps" and with "sync" for contexts that measure them.
            final_samples: Samples of a new round's last inner step over all trainers, shared out in
                proportion to the workers' batches, but at least `fewest_samples`, and less than
                `samples_per_inner_step + fewest_samples`; 0: as many as of the others.

        Returns:
            The report of the round; None if `stop` was called.
        """
        steps = inner_steps or self.sync_every
        return Round(self.state, self._parts, steps, final_samples).run(phase)

    def stop(self) -> None:
        """Stop the round after the current inner steps, and after a fragment in flight has arrived.

        The state can then be saved and resumed. May be called from any thread or signal handler.
        """
        self._parts.halted.set()

    @property
    def state(self) -> RunState:
        """The run's trainers, workers and counters."""
        require(
            self._loaded,
            "load_state_dict has failed, which leaves a mixture of two runs; load a state that "
            "fits, or make the AdLoCo again",
        )
        return self._state

    @property
    def trainers(self) -> dict[int, Trainer]:
        """The living trainers (those that no merge has absorbed), by id."""
        return self.state.trainers

    @property
    def workers(self) -> Mapping[int, Worker]:
        """The workers in this process, by id."""
        return self.state.workers

    @property
    def sync_every(self) -> int:
        """H of the next round: `method.sync_every`, longer by `method.sync_growth`."""
        return self._parts.planner.steps_of_round(self.state.samples)

    @property
    def samples_per_inner_step(self) -> int:
        """Samples that one inner step takes over all trainers, with their current batches."""
        return self._parts.planner.samples_per_inner_step(self.state)

    @property
    def fewest_samples(self) -> int:
        """Fewest samples that an inner step can take over all trainers: one for each worker, or as
        many as the batch rule compares.
        """
        return self._parts.planner.fewest_samples(self.state)

    def load_global(self) -> None:
        """Set all workers to the global parameters of their trainers, where syncs leave them
        diverged. What they have not sent is dropped. Call it on all ranks, between rounds.

        Raises:
            ValueError: A round is in progress.
        """
        require(
            not self.state.in_round, "a round is in progress; load global parameters between rounds"
        )
        self.state.load_global(self.placement)

    def model(self, trainer: int) -> nn.Module:
        """The model of a trainer's first worker, which has the global parameters between rounds.

        Training continues with this model, so copy it before you change it.

        Raises:
            ValueError: A round is in progress, workers have diverged, no such trainer lives, or its
                first worker lives on another rank.
        """
        state = self.state
        require(
            not state.in_round, "a round is in progress, and workers differ; ask between rounds"
        )
        require(
            not state.diverged,
            "syncs have left the workers diverged; call load_global() first",
        )
        living = sorted(state.trainers)
        require(trainer in living, f"there is no trainer {trainer}; living ones are {living}")
        first = state.trainers[trainer].worker_ids[0]
        require(
            first in state.workers,
            f"worker {first} of trainer {trainer} lives on another rank; ask there, or use "
            "state_dict()",
        )
        return state.workers[first].model

    def evaluate(self, share: Share) -> dict[int, list[float]]:
        """Evaluate each trainer's global parameters. Call it on all ranks, between rounds.

        Args:
            share: Evaluates a model on one part of the evaluation set; a trainer's workers and
                their ranks take one part each.

        Returns:
            The mean of each quantity, by trainer id.

        Raises:
            ValueError: A round is in progress.
        """
        found = self.evaluate_islands(lambda island: share)
        return {trainer: means(total([*sums.values()])) for trainer, sums in found.items()}

    def evaluate_islands(self, share_of: Callable[[int], Share]) -> dict[int, dict[int, Sums]]:
        """Evaluate each trainer's global parameters on the text of each island (`Problem.islands`).

        Args:
            share_of: Takes an island, and returns what `evaluate` takes.

        Returns:
            The sums of each quantity, and last their number, by trainer id and island.

        Raises:
            ValueError: A round is in progress.
        """
        require(
            not self.state.in_round,
            "a round is in progress, and workers differ; evaluate between rounds",
        )
        return evaluate(self.state, self.placement, self._parts.islands, share_of)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to continue with the same bits, if `build_model` makes the
        same frozen parameters, and buffers outside of the model's state, as before.

        Call it on all ranks, between rounds or after `stop`. The result is complete on rank 0. Its
        tensors are copies in host memory.
        """
        return dict(sorted(self.placement.collect(list(self.state_parts().items()))))

    def state_parts(self, *, copy: bool = True) -> dict[str, Any]:
        """The entries of `state_dict` that were made on this rank, to be saved by it.

        Call it on all ranks, between rounds or after `stop`. Those of all ranks together are a
        whole `state_dict`.

        copy: False for the tensors themselves, where they are in host memory: to be read before
            training continues.
        """
        parts, handed = self.state.parts(self.placement, copy=copy), self._bytes_handed()
        own = {
            "bytes": list(handed),
            "ranks": self.placement.num_ranks,
            "streaming": str(self._parts.syncing.streaming),
        }
        return {name: {**part, **own} if name == RUN else part for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, or from those of its entries that `local_parts` names.

        Call it on all ranks.

        Raises:
            ValueError: It is not complete, is that of other trainers or workers, or of another
                model, was saved within a round of another schedule, or after another round than
                those of other ranks.
        """
        numbers = run_part(state, self.method, self._parts.syncing.streaming)
        rounds = self.placement.all_values(numbers["rounds_done"])
        require(
            len({*rounds}) == 1,
            f"the ranks' states were saved after rounds {rounds}; load the same one on all ranks",
        )
        own = of_workers(numbers, self.method.living_workers)
        require_parts(state, local_parts(own, self.placement))
        self._loaded = False
        self._state.load_parts({**state, RUN: own}, self.placement, self._new_trainer)
        self._loaded = True
        # Reports divide these totals by today's workers and ranks: as if all had been there before.
        workers = len(self.method.living_workers) / len(numbers["workers"])
        ranks = self.placement.num_ranks / numbers["ranks"]
        between, sent, inside = numbers["bytes"]
        total = Bytes(between * workers, sent * workers, inside * ranks)
        self._bytes_before = self.placement.total_bytes() - total
        self._parts.halted.clear()

    def __getstate__(self) -> NoReturn:
        raise ValueError(
            "an AdLoCo holds threads and hooks, which cannot be copied or pickled; save its "
            "state_dict(), and load that into a new one"
        )

    def _bytes_handed(self) -> Bytes:
        """Bytes that all ranks have given to collectives since the run began."""
        return self.placement.total_bytes() - self._bytes_before

    def _new_trainer(self, trainer: int, worker_ids: Sequence[int] = ()) -> Trainer:
        batching = self._parts.batching
        outer = OuterSync(self._start, self._parts.syncing, self._fragments)
        controller = BatchController(batching.rule, batching.guards)
        return Trainer(trainer, outer, controller, worker_ids)
