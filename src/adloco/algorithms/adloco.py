"""AdLoCo (arXiv 2508.18182, algorithm 1): rounds of local steps with adaptive batches, an outer step per trainer, and merges.

With one trainer and a constant batch this is DiLoCo; with a plain mean as the outer step, LocalSGD; with one worker, plain training.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import torch
from torch import nn

from adloco.algorithms.crew import Crew
from adloco.algorithms.dropout import uses_dropout
from adloco.algorithms.evaluation import Share, evaluate
from adloco.algorithms.merging import MergeFates, apply_merge
from adloco.algorithms.optimizers import InnerFactory, OuterFactory, check_shards
from adloco.algorithms.outer import OuterStep, averaged_buffers
from adloco.algorithms.planning import Planner, agreed_pass_limit, check_groups, check_sizes
from adloco.algorithms.reports import RoundReport, report_sync, report_trainer, report_workers, step_losses
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import InnerSettings, LossFunction, RoundTask, Source, Worker
from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.compressed import keeps_residuals
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.parallel.layers import Fill, layers
from adloco.distributed.placement.one_process import OneProcess, Placement
from adloco.distributed.traffic import Bytes, num_bytes
from adloco.errors import require
from adloco.rules.batch import BatchRule, ConstantBatch
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge import MergePolicy, NoMerge
from adloco.rules.shares import EqualShares, Shares
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming

Phase = Callable[[str], AbstractContextManager[object]]


class AdLoCo:
    """A run: trainers x workers, trained round by round with `rounds`.

    build_model: makes the model; called once on each rank, every worker starts from a copy of the first rank's. loss_fn: (model, batch) -> mean loss
    over the batch's samples; it may call `model`, which can be a wrapper of yours, and should read nothing else of it. fill: for a model without
    memory (on the meta device), gives values to a part of it, so that no rank holds the whole of a sharded one; see `placement.blocks.Fill`.
    data: a `Source` with at least one stream per worker. inner: model -> optimizers of a worker. outer: parameters -> outer optimizer, or None
    to adopt the workers' mean. sync_every: H, inner optimizer steps per round. learning_rate: a schedule over the inner optimizers' own rates,
    in tokens of which each sample has `tokens_per_sample`. shares: how a trainer's batch is split over its workers. test_groups: groups into which
    a worker splits its batch when statistics are taken (a multiple, if it accumulates more). test_every: inner steps from one test to the next; 0: on
    the first of each round. autocast: data type of mixed precision. seed: of dropout. wire: format in which pseudo-gradients cross between workers;
    None: as they are. streaming: how a sync is spread over a round. outer_on_host: whether global parameters, outer optimizer state and what error
    feedback keeps live in host memory. placement: where workers live; this process by default.
    """

    def __init__(
        self,
        *,
        build_model: Callable[[], nn.Module],
        fill: Fill | None = None,
        loss_fn: LossFunction,
        data: Source,
        inner: InnerFactory,
        outer: OuterFactory | None,
        sync_every: int,
        num_trainers: int = 1,
        workers_per_trainer: int = 1,
        batch: BatchRule | None = None,
        guards: BatchGuards | None = None,
        shares: Shares | None = None,
        switch: SwitchMode | None = None,
        merge: MergePolicy | None = None,
        fates: MergeFates | None = None,
        learning_rate: LearningRate | None = None,
        tokens_per_sample: int = 1,
        max_grad_norm: float | None = None,
        test_groups: int = 4,
        test_every: int = 0,
        autocast: torch.dtype | None = None,
        compile: bool = False,
        seed: int = 0,
        wire: WireFormat | None = None,
        streaming: Streaming | None = None,
        outer_on_host: bool = False,
        placement: Placement | None = None,
    ) -> None:
        check_sizes(
            sync_every=sync_every, num_trainers=num_trainers, workers_per_trainer=workers_per_trainer, test_groups=test_groups, test_every=test_every,
            max_grad_norm=max_grad_norm, learning_rate=learning_rate,
        )  # fmt: skip
        self.num_workers = num_trainers * workers_per_trainer
        require(data.num_streams >= self.num_workers, f"data has {data.num_streams} streams, but there are {self.num_workers} workers")
        self.sync_every = sync_every
        self.placement = placement or OneProcess()
        self._rule: BatchRule = batch or ConstantBatch()
        whole = self.placement.shards == 1
        require(whole or self._rule.inner_products is None, "inner-product tests need whole gradients; use the norm test, or one shard per worker")
        self._guards = guards or BatchGuards()
        self._shares: Shares = shares or EqualShares()
        switch = switch or SwitchMode()
        check_groups(self._rule, switch, test_groups, self.placement.ranks_per_worker)
        self._merge: MergePolicy = merge or NoMerge()
        self._fates = fates or MergeFates()
        self._planner = Planner(
            shares=self._shares, switch=switch, learning_rate=learning_rate, tokens_per_sample=tokens_per_sample,
            ranks=self.placement.ranks_per_worker,
        )  # fmt: skip
        self._outer = outer
        self._wire, self._outer_on_host = wire, outer_on_host
        self._streaming = streaming or Streaming()
        settings = InnerSettings(
            loss_fn=loss_fn, data=data, max_grad_norm=max_grad_norm, test_groups=test_groups, test_every=test_every,
            takes_moments=self._rule.needs_moments, inner_products=self._rule.inner_products, autocast=autocast, seed=seed,
            device=self.placement.device, error_feedback=keeps_residuals(wire), on_host=outer_on_host,
        )  # fmt: skip
        # Every trainer starts from the same parameters: averages of models from different starts mean nothing.
        model = build_model()
        if fill is None:
            self.placement.start_alike(model)
        require(not (compile and uses_dropout(model)), "a compiled model cannot draw dropout for each worker; set compile False or dropout 0")
        self.num_parameters = sum(parameter.numel() for parameter in trainable(model))
        self._model_bytes = num_bytes(trainable(model))
        require(self.num_parameters > 0, "build_model returned a model without trainable parameters")
        here = self.placement.local(range(self.num_workers))
        copies = [model, *(copy.deepcopy(model) for _ in here[1:])]
        workers = {
            worker: Worker(worker, own, inner, settings, self.placement.engine(own, compile, fill)) for worker, own in zip(here, copies, strict=True)
        }
        worker = next(iter(workers.values()))
        self._model, self._first_rate = worker.model, worker.base_rates[0][0]
        self._fragments = self._streaming.cut(layers(self._model), sync_every)
        each = workers_per_trainer
        trainers = {trainer: self._new_trainer(trainer, range(trainer * each, (trainer + 1) * each)) for trainer in range(num_trainers)}
        outers = [trainer.outer.optimizer for trainer in trainers.values() if trainer.outer.optimizer]
        check_shards([*worker.optimizers, *outers], self.placement.shards)
        self._crew = Crew(workers, trainers, self._streaming, self.placement)
        self.rounds_done = self.samples = self.inner_steps = self.syncs = 0
        self.speeds: dict[int, float] = {}
        self.pass_limit = self._limit_before = 0
        self.round_steps = 0
        """Inner steps of the round under way; 0 between rounds."""
        self._events_done = 0
        self._bytes_before = self.placement.bytes_handed()
        self._halted = Event()

    def _new_trainer(self, trainer: int, worker_ids: range) -> Trainer:
        outer = OuterStep(trainable(self._model), self._outer, fragments=self._fragments, wire=self._wire, on_host=self._outer_on_host)
        return Trainer(trainer, outer, averaged_buffers(self._model), BatchController(self._rule, self._guards), worker_ids)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Run this many rounds, or fewer if `stop` is called."""
        for _ in range(count):
            report = self.round()
            if report is None:
                return
            yield report

    def round(self, inner_steps: int | None = None, phase: Phase = nullcontext, *, last: bool = False) -> RoundReport | None:
        """One round, or what is left of it: inner steps (`sync_every` unless told), syncs, batch decisions, merge. None if `stop` was called.

        phase: entered for "inner_steps" and for "sync", to measure them. last: whether to settle at the end of the round.
        """
        if not self.in_round:
            self.round_steps, self._events_done = inner_steps or self.sync_every, 0
            self._limit_before = self.pass_limit
            self._crew.begin_round()
        tasks = self._planner.tasks(
            self.trainers, self.speeds, samples=self.samples, steps_before=self.inner_steps, inner_steps=self.round_steps,
            pass_limit=self.pass_limit,
        )  # fmt: skip
        for event in self._streaming.events(self.round_steps)[self._events_done :]:
            with phase("inner_steps"):
                # While a fragment travels nobody stops: a state to resume from has none under way.
                self._crew.train(tasks, event.step, self._halted if event.kind == "send" else None)
            with phase("sync"):
                if event.kind == "send" and self._crew.agree(self._halted.is_set()):
                    self._halted.clear()
                    self.pass_limit = agreed_pass_limit(self.workers, self.pass_limit, self.placement)
                    return None
                self._crew.sync(event, tasks)
            self._events_done += 1
        with phase("sync"):
            return self._finish(tasks, last)

    def stop(self) -> None:
        """End the round under way after the inner steps in progress; from any thread or signal handler. The state can be saved and resumed.

        A fragment that travels arrives first.
        """
        self._halted.set()

    @property
    def in_round(self) -> bool:
        """Whether a round has begun and not ended: workers stand apart from their trainers."""
        return self.round_steps > 0

    @property
    def samples_per_inner_step(self) -> int:
        """Samples that one inner step takes over all trainers, with the batches now in force."""
        return self._planner.samples_per_inner_step(self.trainers, self.speeds)

    @property
    def samples_so_far(self) -> int:
        """Samples trained on, those of the round under way included (of the workers in this process)."""
        return self.samples + (sum(worker.round_samples for worker in self.workers.values()) if self.in_round else 0)

    @property
    def trainers(self) -> dict[int, Trainer]:
        """The living ones, by id."""
        return self._crew.trainers

    @property
    def workers(self) -> dict[int, Worker]:
        """Those that live in this process, by id."""
        return self._crew.workers

    def settle(self) -> None:
        """Bring each trainer's workers together at their mean, where syncs have left them apart. Called on all ranks, between rounds."""
        require(not self.in_round, "a round is under way; settle between rounds")
        self._crew.settle()

    def _finish(self, tasks: Mapping[int, RoundTask], last: bool) -> RoundReport:
        self.pass_limit = agreed_pass_limit(self.workers, self.pass_limit, self.placement)
        done = self._crew.end_round(tasks)
        self.rounds_done += 1
        self.inner_steps += self.round_steps
        self.syncs += any(len(trainer.worker_ids) > 1 for trainer in self.trainers.values())
        trainers = []
        for trainer in self.trainers.values():
            mine = [done[worker] for worker in trainer.worker_ids]
            requested, served_by = trainer.requested_batch, list(trainer.worker_ids)
            samples = sum(worker.samples for worker in mine)
            trainer.update_batch([worker.moments for worker in mine], int(samples))
            train_loss = sum(worker.loss_sum for worker in mine) / samples
            trainers.append(report_trainer(trainer, requested, [tasks[worker] for worker in served_by], mine, train_loss, self._first_rate))
        samples = sum(worker.samples for worker in done.values())
        self.samples += int(samples)
        self.speeds = self._shares.update(self.speeds, {worker: row.samples / row.turn_seconds for worker, row in done.items()})
        self.round_steps = 0
        merge = self._merge.decide(self.rounds_done, {trainer.id: trainer.requested_batch for trainer in self.trainers.values()})
        if merge or last:
            self._crew.settle()
        if merge:
            self._crew.trainers = apply_merge(merge, self.trainers, self.workers, self._fates, self.placement)
        handed = self._bytes_handed()
        return RoundReport(
            round=self.rounds_done,
            samples=self.samples,
            inner_steps=self.inner_steps,
            syncs=self.syncs,
            pass_limit=self.pass_limit if self.pass_limit != self._limit_before else 0,
            bytes_communicated=handed.between / self.num_workers,
            bytes_sent=handed.sent / self.num_workers,
            bytes_inside=handed.inside / self.placement.num_ranks,
            bytes_ddp_equivalent=self._model_bytes * self.inner_steps,
            train_loss=sum(worker.loss_sum for worker in done.values()) / samples,
            sync=report_sync(done, trainers, self._model_bytes, self.placement.num_ranks // self.placement.ranks_per_worker),
            trainers=tuple(trainers),
            workers=report_workers(tasks, done),
            merges=(merge,) if merge else (),
            steps=step_losses(tasks, done),
        )

    def _bytes_handed(self) -> Bytes:
        """Since the run began."""
        return self.placement.bytes_handed() - self._bytes_before

    def model(self, trainer: int) -> nn.Module:
        """A model at the trainer's global parameters, between rounds; training goes on from it, so copy before changing it."""
        require(not self.in_round, "a round is under way: the workers stand apart; ask between rounds")
        require(not self._crew.apart, "syncs have left the workers apart; call settle() first")
        require(trainer in self.trainers, f"there is no trainer {trainer}; living ones are {sorted(self.trainers)}")
        return self.workers[self.trainers[trainer].worker_ids[0]].model

    def evaluate(self, share: Share) -> dict[int, list[float]]:
        """Means of quantities for each trainer's global parameters, its work shared among the trainer's workers."""
        require(not self.in_round, "a round is under way: the workers stand apart; evaluate between rounds")
        return evaluate(self.trainers, self.workers, self.placement, share, apart=self._crew.apart)

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit for bit, between rounds or, after `stop`, within one. Tensors are the live ones.

        Complete in the first process; called in all.
        """
        kept = [trainer for trainer in self.trainers.values() if self.placement.local(trainer.worker_ids[:1])]
        workers = [(str(worker.id), worker.state_dict(with_params=self.in_round or self._crew.apart)) for worker in self.workers.values()]
        return {
            "rounds_done": self.rounds_done,
            "samples": self.samples,
            "inner_steps": self.inner_steps,
            "syncs": self.syncs,
            "round_steps": self.round_steps,
            "events_done": self._events_done,
            "apart": self._crew.apart,
            "pass_limit": self.pass_limit,
            "speeds": {str(worker): speed for worker, speed in self.speeds.items()},
            "bytes": list(self._bytes_handed()),
            "trainers": self.placement.collect(self.placement.whole([trainer.state_dict() for trainer in kept])),
            "workers": dict(self.placement.collect(self.placement.whole(workers))),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds_done, self.samples = state["rounds_done"], state["samples"]
        self.inner_steps, self.syncs = state["inner_steps"], state["syncs"]
        self.round_steps, self._events_done = state["round_steps"], state["events_done"]
        self.pass_limit = self._limit_before = state["pass_limit"]
        self.speeds = {int(worker): speed for worker, speed in state["speeds"].items()}
        self._bytes_before = self.placement.bytes_handed() - Bytes(*state["bytes"])
        self._halted.clear()
        trainers = {int(saved["trainer"]): self._new_trainer(int(saved["trainer"]), range(0)) for saved in state["trainers"]}
        for saved in state["trainers"]:
            trainers[int(saved["trainer"])].load_state_dict(saved)
        self._crew.restore(dict(sorted(trainers.items())), state["workers"], state["apart"])
