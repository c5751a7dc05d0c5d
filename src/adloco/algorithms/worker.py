"""A worker: one model copy, one inner optimizer, one data stream, and its inner steps (AdLoCo algorithm 1, arXiv 2508.18182).

H counts inner optimizer steps, not micro-batches. Gradient statistics are taken on the first inner step of a round, where all workers of a
trainer stand at the same point.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adloco.algorithms.dropout import own_dropout, uses_dropout
from adloco.algorithms.gradient_stats import MeasuredStep
from adloco.algorithms.optimizers import InnerFactory
from adloco.algorithms.outer import averaged_buffers, copy_all, counters, load_optimizer, not_finite
from adloco.algorithms.streaming import SyncNumbers
from adloco.distributed.device import autocast, to_device
from adloco.distributed.device_memory import free_memory, ran_out_of_memory
from adloco.distributed.dtensor import copied, zeros_like
from adloco.distributed.parallel.gradient_norms import clip, trainable
from adloco.distributed.parallel.island import Engine
from adloco.rules.batch import Estimator
from adloco.rules.moments import Moments
from adloco.rules.switch import BatchPlan

ADVICE = "lower the learning rate or check the data"

LossFunction = Callable[[Any, Any], Tensor]
"""(model, batch) -> mean loss over the batch's samples."""


class Source(Protocol):
    """Data as numbered samples in numbered streams (DESIGN section 3, seam 2)."""

    @property
    def num_streams(self) -> int:
        """How many disjoint streams there are."""
        ...

    def read(self, stream: int, position: int, count: int) -> Any:
        """Samples position .. position + count - 1 of a stream, as a batch; depends on these numbers and a seed alone."""
        ...


class NonFiniteLossError(RuntimeError):
    """A loss or a worker's parameters became nan or infinite; the trainers' global parameters are as they were at the last sync."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out where the step could not be repeated with smaller micro-batches. pass_limit: the largest ones to try next; 0: none are left."""

    def __init__(self, message: str, pass_limit: int = 0) -> None:
        super().__init__(message)
        self.pass_limit = pass_limit


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """What every worker of a run does alike."""

    loss_fn: LossFunction
    data: Source
    max_grad_norm: float | None
    test_groups: int
    test_every: int
    takes_moments: bool
    inner_products: Estimator | None
    """How Var<g_i, G> is estimated at tests, if it is."""
    autocast: torch.dtype | None
    seed: int
    device: torch.device
    error_feedback: bool
    """Whether what a sync leaves unsent is kept for the next."""
    on_host: bool
    """Whether that, and where a worker stands while the global parameters are evaluated, is kept in host memory."""


@dataclass(frozen=True, kw_only=True)
class RoundTask:
    """What a worker does in this round."""

    trainer: int
    plan: BatchPlan
    inner_steps: int
    first_step: int
    """Inner steps of the run before this round, for messages."""
    lr_factor: Callable[[int], float] | None
    """Factor on the optimizers' own learning rates for each inner step of the round, counted from 0."""


class Worker:
    """One model copy that trains on its own stream between syncs."""

    def __init__(self, worker: int, model: nn.Module, inner: InnerFactory, settings: InnerSettings, engine: Engine) -> None:
        self.id = worker
        self.model = model
        self.params = trainable(model)
        self.buffers = averaged_buffers(model)
        self.counters = counters(model)
        self.optimizers = list(inner(model))
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.stream = worker
        self.position = 0
        self.inner_step = 0
        self.round_samples = 0
        self.busy_seconds = 0.0
        self.losses: list[float] = []
        self.moments = Moments()
        self.sync = SyncNumbers()
        """Of this round."""
        self.pass_limit = 0
        """Where memory ran out: the largest micro-batch until the plans know."""
        self.residuals = [zeros_like(parameter, torch.float32, to_host=settings.on_host) for parameter in self.params if settings.error_feedback]
        """With error feedback: what no sync has sent yet."""
        self._settings = settings
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._drops = uses_dropout(model)
        self.engine = engine

    def begin_round(self) -> None:
        """Forget the records of the last round."""
        self.inner_step = 0
        self.round_samples = 0
        self.busy_seconds = 0.0
        self.losses = []
        self.moments = Moments()
        self.sync = SyncNumbers()

    def count_sync(self, part: SyncNumbers) -> None:
        """Add a sync, of which this is this rank's part, to those of the round."""
        self.sync += SyncNumbers.from_numbers(self.engine.sum(part.to_numbers()))

    def advance(self, task: RoundTask, until: int, halted: Event) -> None:
        """Inner steps of the round up to that one, or until halted between two of them (on all ranks of the island after the same one)."""
        if self.inner_step == until:
            return
        began = time.monotonic()
        self.model.train()
        stopping = self.engine.sum([float(halted.is_set())])[0] > 0
        while self.inner_step < until and not stopping:
            stopping = self._step(task, halted)
        if self.inner_step == until:
            # A gradient can overflow where the loss does not; it must not reach the others.
            self._check_finite(task)
        self.engine.average(self.buffers)
        self.busy_seconds += time.monotonic() - began

    def _step(self, task: RoundTask, halted: Event) -> bool:
        """One inner step; returns whether any rank of the island was told to halt."""
        self._drop_gradients()  # Of a step that failed half-way.
        if task.lr_factor is not None:
            self._scale_rates(task.lr_factor(self.inner_step))
        testing = self._settings.takes_moments and self._tests(task)
        plan = task.plan.in_groups(self._settings.test_groups) if testing else task.plan
        parts = self._backward(plan, testing)
        norm_sq = self.engine.norm_sq_part() if self._settings.max_grad_norm is not None else 0.0
        loss, norm_sq, halting = self.engine.sum([float(parts.double().sum()), norm_sq, float(halted.is_set())])
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"loss is {loss} in {self._place(task, self.inner_step + 1)}; {ADVICE}")
        if self._settings.max_grad_norm is not None:
            clip(self.params, math.sqrt(norm_sq), self._settings.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self._drop_gradients()
        self.position += plan.worker_batch
        self.round_samples += plan.worker_batch
        self.losses.append(loss)
        self.inner_step += 1
        return halting > 0

    def _backward(self, plan: BatchPlan, testing: bool) -> Tensor:
        """Gradients of a step and its micro-batches' losses; the same samples in halved micro-batches wherever memory runs out."""
        statistics = [buffer.clone() for buffer in (*self.buffers, *self.counters)]
        while True:
            plan = plan.at_most(self.pass_limit) if self.pass_limit else plan
            try:
                return self._backward_with_moments(plan) if testing else torch.stack(list(self._micro_steps(plan)))
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                self.pass_limit = plan.micro_batch // 2
                if plan.ranks > 1 or self.pass_limit == 0:
                    # The other ranks of the island are in the middle of the step: it cannot be repeated.
                    advice = f"set switch.pass_limit {self.pass_limit}" if self.pass_limit else "one sample does not fit: see adloco probe"
                    where = f"with micro-batches of {plan.micro_batch} on {self._settings.device}"
                    raise OutOfMemoryError(f"memory ran out {where}; {advice}", self.pass_limit) from error
            # Here, where the error no longer holds what it was raised from.
            self._drop_gradients()
            copy_all(statistics, [*self.buffers, *self.counters])
            free_memory(self._settings.device)

    def _check_finite(self, task: RoundTask) -> None:
        name = not_finite(self._names, self.params, self.engine.sum)
        if name:
            raise NonFiniteLossError(f"parameter {name} is not finite in {self._place(task, self.inner_step)}; {ADVICE}")

    def _tests(self, task: RoundTask) -> bool:
        """Whether gradient statistics are taken on the coming inner step."""
        every = self._settings.test_every
        return self.inner_step == 0 if every == 0 else (task.first_step + self.inner_step) % every == 0

    def _place(self, task: RoundTask, inner_step: int) -> str:
        return f"trainer {task.trainer}, worker {self.id}, inner step {task.first_step + inner_step}"

    def _micro_steps(self, plan: BatchPlan) -> Iterator[Tensor]:
        """Forward and backward of each micro-batch of this rank, weighted by its samples; yields its part of the mean loss."""
        own = plan.of_rank(self.engine.rank)
        for index, (offset, samples) in enumerate(own):
            batch = to_device(self._settings.data.read(self.stream, self.position + offset, samples), self._settings.device)
            with self.engine.reducing(last=index == len(own) - 1):
                with self._own_dropout(offset), autocast(self._settings.device, self._settings.autocast):
                    loss = self._settings.loss_fn(self.engine.forward, batch) * (samples / plan.worker_batch)
                loss.backward()  # type: ignore[no-untyped-call]
            yield loss.detach()

    def _own_dropout(self, offset: int) -> contextlib.AbstractContextManager[Any]:
        if not self._drops:
            return contextlib.nullcontext()
        return own_dropout(self._settings.seed, self.stream, self.position + offset, self._settings.device)

    def _backward_with_moments(self, plan: BatchPlan) -> Tensor:
        """The step's losses; adds its moments to those of the round."""
        step = MeasuredStep(
            plan=plan,
            passes=self._micro_steps,
            engine=self.engine,
            params=self.params,
            statistics=[*self.buffers, *self.counters],
            inner_products=self._settings.inner_products,
        )
        losses, moments = step.backward()
        self.moments += moments
        return losses

    def _drop_gradients(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    def _scale_rates(self, factor: float) -> None:
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def load_params(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Stand at these parameters."""
        copy_all(params, self.params)
        copy_all(buffers, self.buffers)

    @contextlib.contextmanager
    def standing_at(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
        """Stand at these parameters for as long as the context lasts."""
        own = [[copied(tensor, to_host=self._settings.on_host) for tensor in tensors] for tensors in (self.params, self.buffers)]
        self.load_params(params, buffers)
        try:
            yield
        finally:
            self.load_params(*own)

    def state_dict(self, *, with_params: bool) -> dict[str, Any]:
        """with_params: whether the worker stands anywhere else than at its trainer's global parameters."""
        return {
            "stream": self.stream,
            "position": self.position,
            "inner_step": self.inner_step,
            "round_samples": self.round_samples,
            "busy_seconds": self.busy_seconds,
            "losses": self.losses,
            "moments": self.moments.to_numbers(),
            "sync": self.sync.to_numbers(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": list(self.counters),
            "residuals": list(self.residuals),
            "params": list(self.params) if with_params else [],
            "buffers": list(self.buffers) if with_params else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stream, self.position = state["stream"], state["position"]
        self.inner_step, self.round_samples = state["inner_step"], state["round_samples"]
        self.busy_seconds = state["busy_seconds"]
        self.losses = list(state["losses"])
        self.moments = Moments.from_numbers(state["moments"])
        self.sync = SyncNumbers.from_numbers(state["sync"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        copy_all(state["counters"], self.counters)
        copy_all(state["residuals"], self.residuals)
        if state["params"]:
            self.load_params(state["params"], state["buffers"])
