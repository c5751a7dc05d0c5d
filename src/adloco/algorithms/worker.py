"""A worker: one model copy, one inner optimizer, one data stream, and its inner steps (AdLoCo
algorithm 1, arXiv 2508.18182).

H counts inner optimizer steps, not micro-batches. Gradient statistics are taken on the test steps
of a round (`GradientTest`).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.cuda_graphs import (
    CapturedPasses,
    CapturedUpdate,
    Lane,
    can_capture,
    has_graphs,
)
from adloco.algorithms.dropout import own_dropout, uses_dropout
from adloco.algorithms.gradient_stats import Measurement, NormMeasurement, measurement_of
from adloco.algorithms.method import Batching, Execution, Method, Problem, Syncing
from adloco.algorithms.micro_batch_limit import Halving
from adloco.algorithms.model_state import (
    ADVICE,
    Replica,
    copy_all,
    frozen_bytes,
    state_buffers,
)
from adloco.algorithms.muon_step import Muon
from adloco.algorithms.optimizer_state import (
    begins_with_zeros,
    forget,
    load_optimizer,
    saved_optimizer,
)
from adloco.algorithms.optimizers import InnerFactory, needs_closure, require_all
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.worker_round import WorkerRound
from adloco.distributed.device import autocast, on_stream, read_later, require_samples, to_device
from adloco.distributed.dtensor import copied, local
from adloco.distributed.parallel.engine import Engine
from adloco.distributed.parallel.gradient_norms import clip, trainable
from adloco.distributed.parallel.layers import free_gathered
from adloco.errors import NonFiniteLossError, require
from adloco.rules.moments import Moments
from adloco.rules.switch import BatchPlan


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """Settings that all workers of a run share."""

    problem: Problem
    method: Method
    inner: InnerFactory
    batching: Batching
    execution: Execution
    device: torch.device
    syncing: Syncing
    """It decides whether workers keep residuals, and where these are, as well as parameters that
    are swapped out for an evaluation."""

    @cached_property
    def lane(self) -> Lane:
        """Where graphs of workers run that take turns because their passes are compiled. Others
        have lanes of their own, and compute at once.
        """
        return Lane(self.device)


class Worker:
    """One model copy that trains on its own stream between syncs."""

    def __init__(
        self, worker: int, model: nn.Module, settings: InnerSettings, engine: Engine
    ) -> None:
        self.id = worker
        self.model = model
        self.replica = Replica.of(model, settings.syncing.residuals_in)
        self.counters = state_buffers(model, floating=False)
        self._frozen = frozen_bytes(model, {*self.replica.names})
        self._settings = settings
        self.engine = engine
        self.optimizers = self._new_optimizers()
        require_all(self.optimizers, self.replica.names, self.replica.params, "inner")
        for optimizer in self.optimizers:
            require(
                all(group.get("lr") is not None for group in optimizer.param_groups),
                f"inner gives {type(optimizer).__name__}, whose groups have no learning rate lr "
                "for a schedule to multiply; give each group one",
            )
            require(
                not needs_closure(optimizer),
                f"inner gives {type(optimizer).__name__}, whose step() needs a closure that "
                "computes the loss again; give an optimizer that steps with the gradients alone",
            )
        self.base_rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        rule = settings.batching.rule
        self._measurement: Measurement = measurement_of(rule)(
            rule, self.replica.params, self._statistics
        )
        self.stream = worker
        self.position = 0
        self.round = WorkerRound()
        self.halving = Halving(settings.device)
        self.reads_late = (
            settings.device.type != "cpu" and settings.execution.on_nonfinite == "stop"
        )
        """True to read a step's numbers from the device while it computes the next step. Other
        answers to a number that is not finite come before the step."""
        self._unread: list[Callable[[], list[float]]] = []
        problem = settings.problem
        self._drops = uses_dropout(model)
        self._loss_fn = (engine.compiles and problem.compiled_loss_fn) or problem.loss_fn
        replayable = problem.replayable and not (self._drops or self._statistics)
        self._passes: CapturedPasses | None = None
        self._captured_update: CapturedUpdate | None = None
        self._lane: Lane | None = None
        if replayable and engine.is_alone and has_graphs(settings.device):
            self._lane = lane = settings.lane if engine.compiles else Lane(settings.device)
            self._passes = CapturedPasses(self.replica.params, lane, compiled=engine.compiles)
            if can_capture(self.optimizers):
                self._captured_update = CapturedUpdate(self.optimizers, lane)
        self._captures = False
        """True if the passes of this round are captured."""

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        built = self._settings.inner(self.model)
        optimizers = [built] if isinstance(built, torch.optim.Optimizer) else list(built or ())
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                optimizer.owners = self.engine.owners
        return optimizers

    def begin_round(self) -> None:
        """Clear the numbers of the last round."""
        self.round, self._unread = WorkerRound(), []

    @property
    def inner_step(self) -> int:
        """Inner steps that it has taken in the round."""
        return len(self.round.losses) + len(self._unread)

    def captures(self, plan: BatchPlan, *, shared: bool = False) -> bool:
        """True if all passes of a step can be captured.

        shared: True to ask whether they are also so small that those of several workers are
            computed at once.
        """
        elements = plan.micro_batch * (self._settings.problem.tokens_per_sample + 1)
        return self._passes is not None and self._passes.fit(elements, shared=shared)

    def advance(self, task: RoundTask, until: int, halted: Event) -> None:
        """Take inner steps until the round has `until` of them, or until `halted` is set.

        All ranks of the island halt after the same step.

        Raises:
            NonFiniteLossError: The loss, the gradient, or at the end a parameter or the optimizer's
                state is NaN or infinite, and `on_nonfinite` has no answer to it.
            OutOfMemoryError: Memory ran out, and the step cannot be repeated with less.
        """
        if self.inner_step == until:
            return
        self._captures = self.captures(task.plan)
        if not self._captures:  # Others of the lane may still be small enough.
            for captured in (self._passes, self._captured_update):
                if captured:
                    captured.forget()
        with on_stream(self._lane.stream if self._lane and self._captures else None):
            self._advance(task, until, halted)

    def _advance(self, task: RoundTask, until: int, halted: Event) -> None:
        began = self._settings.execution.clock()
        self.model.train()
        free_gathered(self.model)  # Somebody may have asked the model between rounds.
        # Agreed on by the island: the collectives of a step would wait for a rank that has left.
        stopping = self.engine.sum([float(halted.is_set())])[0] > 0
        try:
            while self.inner_step < until and not stopping:
                stopping = self._step(task, halted)
        finally:
            # If a step fails because the one before was not finite, that is the error to show.
            self._read(task, all_but=0)
        not_finite = self.round.skipped_steps + self.round.restarts
        if 1 < task.inner_steps == self.inner_step == not_finite:
            place = task.place(self.id, self.inner_step)
            raise NonFiniteLossError(f"no step of the round was finite until {place}; {ADVICE}")
        added = {*trainable(self.model)} - {*self.replica.params}
        require(
            not added,
            f"{len(added)} parameters of worker {self.id} require gradients now and did not when "
            "the run began, or were replaced, so they would never be trained; let build_model "
            "unfreeze what is to be trained",
        )
        require(
            torch.equal(frozen_bytes(self.model, {*self.replica.names}), self._frozen),
            f"frozen parameters of worker {self.id} have changed in training, and no checkpoint "
            "has them; keep what follows the weights, such as a teacher or a mean of them, in "
            "buffers (register_buffer), which are saved and averaged",
        )
        # Neither a sync nor a checkpoint may take what is not finite.
        try:
            self.replica.require_finite(
                task.place(self.id, self.inner_step), self.engine.sum, self.optimizers
            )
        except NonFiniteLossError:
            if self._settings.execution.on_nonfinite != "restore":
                raise
            self._restart(task)
        self.round.busy_seconds += self._settings.execution.clock() - began

    def _step(self, task: RoundTask, halted: Event) -> bool:
        """Take one inner step. True if any rank of the island was told to halt."""
        self._drop_gradients()  # A step before may have failed half-way.
        if task.lr_factor is not None:
            self._scale_rates(task.lr_factor(self.inner_step))
        batching = self._settings.batching
        tests = task.tests(batching.test, self.inner_step)
        # A rule that compares no groups (a constant batch, a ramp) needs no statistics.
        testing = tests and batching.rule.fewest_groups > 1
        plan = task.plan_of(self.inner_step)
        plan = plan.in_groups(batching.test.groups) if testing else plan
        # To go back to if the step is left out or repeated: forward passes change the buffers.
        statistics, moments = [tensor.clone() for tensor in self._statistics], self.round.moments
        parts = self._backward(plan, testing, statistics)
        stops = self._settings.execution.on_nonfinite == "stop"
        measured = self._settings.method.max_grad_norm > 0 or not stops
        norm_sq = self.engine.norm_sq_part() if measured else 0.0
        # One reduction for all three, because each takes a round trip between the island's ranks.
        numbers = self.engine.sum_on_device([parts.double().sum(), norm_sq, halted.is_set()])
        read = read_later(numbers)
        self._unread.append(read)
        halting = self._read(task, all_but=int(self.reads_late))
        if stops or all(map(math.isfinite, read())):
            self._update(numbers[1].sqrt())
            # Each rank of the island has seen other samples. After each step and not once a round,
            # so that a run that is stopped within a round and resumed has the same bits.
            self.engine.average(self.replica.buffers)
        else:
            self.round.moments = moments
            copy_all(statistics, self._statistics)
            # The samples count as read.
            if self._settings.execution.on_nonfinite == "skip":
                self.round.skipped_steps += 1
            else:
                self._restart(task)
        self._drop_gradients()  # A sync needs their memory; captured passes alone keep them.
        self.position += plan.worker_batch
        self.round.batches.append(plan.worker_batch)
        return halting

    def _read(self, task: RoundTask, all_but: int) -> bool:
        """Read the numbers of steps but the newest; True if any rank was told to halt."""
        halting = False
        while len(self._unread) > all_but:
            loss, norm_sq, halt = self._unread[0]()
            finite = math.isfinite(loss) and math.isfinite(norm_sq)
            if self._settings.execution.on_nonfinite == "stop" and not finite:
                what = "norm of the gradient" if math.isfinite(loss) else "loss"
                value = math.sqrt(norm_sq) if math.isfinite(loss) else loss
                place = task.place(self.id, len(self.round.losses) + 1)
                raise NonFiniteLossError(f"{what} is {value} in {place}; {ADVICE}")
            del self._unread[0]
            self.round.losses.append(loss)
            halting |= halt > 0
        return halting

    def _update(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm this is, and step."""
        if self._captured_update and self._passes and self._passes.attached:
            self._captured_update.run(self._clip_and_step, norm)
        else:
            self._clip_and_step(norm)

    def _clip_and_step(self, norm: Tensor) -> None:
        if (most := self._settings.method.max_grad_norm) > 0:
            clip(self.replica.params, norm, most)
        for optimizer in self.optimizers:
            optimizer.step()

    def _restart(self, task: RoundTask) -> None:
        """Start again from the parameters of the last sync, with fresh optimizer state."""
        copy_all(task.start, [*self.replica.params, *self.replica.buffers])
        # Moments that are not finite would spoil the next steps, and so would a residual.
        self.forget()
        self.round.restarts += 1

    def forget(self) -> None:
        """Forget optimizer state and residuals, as at the start of the run."""
        if all(map(begins_with_zeros, self.optimizers)):
            for optimizer in self.optimizers:
                forget(optimizer)
        else:  # Others may begin with a state, or count in their groups.
            self.optimizers = self._new_optimizers()
        for residual in self.replica.residuals:
            residual.zero_()

    @property
    def _statistics(self) -> list[Tensor]:
        """The buffers of the model's state, which forward passes change."""
        return [*self.replica.buffers, *self.counters]

    def _backward(self, plan: BatchPlan, testing: bool, statistics: Sequence[Tensor]) -> Tensor:
        """Compute the gradients of a step; return the loss of each micro-batch.

        statistics: A copy of `_statistics` from before the step.
        """

        def compute(plan: BatchPlan) -> Tensor:
            if not testing:
                return torch.stack(list(self._micro_steps(plan)))
            # Hooks of other measurements see each gradient, and a graph calls none.
            capture = type(self._measurement) is NormMeasurement
            passes = partial(self._micro_steps, capture=capture)
            losses, moments = self._measurement.backward(plan, passes, self.engine)
            # A measurement of one's own may give tensors, which no checkpoint's text could hold.
            self.round.moments += Moments(*map(float, vars(moments).values()))
            return losses

        def undo() -> None:
            self._drop_gradients()
            self.free_graphs()
            copy_all(statistics, self._statistics)

        return self.halving.run(plan, compute, undo)

    def _micro_steps(self, plan: BatchPlan, capture: bool = True) -> Iterator[Tensor]:
        """Run forward and backward on each micro-batch of this rank. Yields its part of the mean
        loss: the micro-batch's mean loss times its share of the worker's samples.
        """
        own = plan.of_rank(self.engine.rank)
        for index, (offset, samples) in enumerate(own):
            # A rank without samples takes part in the reductions with one sample of weight 0.
            asked = self.stream, self.position + offset, max(samples, 1)
            batch = self._settings.problem.data.read(*asked)
            require_samples(batch, *asked)
            share = samples / plan.worker_batch
            compute = partial(self._pass, offset)
            with self.engine.reducing(last=index == len(own) - 1):
                # Asked each time: if memory ran out in a capture, smaller passes take none either.
                if capture and self._captures and self._passes and self.captures(plan):
                    loss = self._passes.run(compute, batch, share, self.engine.sums)
                else:
                    loss = compute(to_device(batch, self._settings.device), share)
            yield loss

    def _pass(self, offset: int, batch: Any, share: Tensor | float) -> Tensor:
        """Run forward and backward on a micro-batch, which begins at this sample of the step and
        has this share of the worker's samples. Returns its part of the mean loss.
        """
        device, execution = self._settings.device, self._settings.execution
        dropout: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._drops:
            first = self.position + offset
            dropout = own_dropout(execution.seed, self.stream, first, device)
        with dropout, autocast(device, execution.autocast):
            loss = checked_loss(self._loss_fn(self.engine.forward, batch), trains=True) * share
        loss.backward()
        return loss.detach()

    def free_graphs(self) -> None:
        """Free what captured passes and updates keep, of all workers with which it takes turns."""
        if self._lane:
            self._lane.forget()

    def _drop_gradients(self) -> None:
        for parameter in self.replica.params:
            parameter.grad = None

    def _scale_rates(self, factor: float) -> None:
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    @contextlib.contextmanager
    def swapped_params(self, params_and_buffers: Sequence[Tensor]) -> Iterator[None]:
        """Put these parameters and buffers into the model while the context lasts."""
        memory = self._settings.syncing.memory
        free_gathered(self.model)
        own = [
            copied(tensor, device=memory.place(local(tensor).device))
            for tensor in (*self.replica.params, *self.replica.buffers)
        ]
        copy_all(params_and_buffers, [*self.replica.params, *self.replica.buffers])
        try:
            yield
        finally:
            copy_all(own, [*self.replica.params, *self.replica.buffers])

    def numbers(self) -> dict[str, Any]:
        """The part of its state that is plain numbers; the rest is `tensors`."""
        return {
            "stream": self.stream,
            "position": self.position,
            "halved_to": self.halving.limit,
            "round": asdict(self.round),
        }

    def tensors(self, *, with_params: bool) -> dict[str, Any]:
        """The live tensors of the state.

        with_params: Include parameters and buffers, because they differ from the trainer's global
            ones (in the middle of a round).
        """
        return {
            "optimizers": [saved_optimizer(optimizer) for optimizer in self.optimizers],
            "counters": list(self.counters),
            "residuals": list(self.replica.residuals),
            "params": list(self.replica.params) if with_params else [],
            "buffers": list(self.replica.buffers) if with_params else [],
        }

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from `numbers`."""
        self.stream, self.position = numbers["stream"], numbers["position"]
        self.halving.limit = numbers["halved_to"]
        self.round, self._unread = WorkerRound.from_state(numbers["round"]), []

    def load_tensors(self, state: Mapping[str, Any]) -> None:
        """Set the tensors of the state to copies of those of `tensors`."""
        saved_with, own = len(state["optimizers"]), len(self.optimizers)
        require(
            saved_with == own,
            f"the state is that of {saved_with} inner optimizers for each worker, and here are "
            f"{own}; give the inner optimizer that it was saved with",
        )
        require(
            [each.shape for each in state["counters"]] == [each.shape for each in self.counters],
            "the state is that of a model with other buffers; load it with the model that it was "
            "saved with",
        )
        free_gathered(self.model)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        copy_all(state["counters"], self.counters)
        copy_all(state["residuals"], self.replica.residuals)
        if state["params"]:
            copy_all(state["params"], self.replica.params)
            copy_all(state["buffers"], self.replica.buffers)


def checked_loss(found: Any, *, trains: bool) -> Tensor:
    """What a loss function has returned; ValueError unless it is one number.

    trains: True if gradients must be computed from it.
    """
    kind = type(found).__name__
    if isinstance(found, Tensor):
        if found.numel() == 1 and (found.requires_grad or not trains):
            return found
        kind = f"a tensor of shape {[*found.shape]}"
    raise ValueError(
        "loss_fn must return the mean loss of a batch: a tensor of one number from which gradients "
        f"can be computed, and not .item() or a model's whole output; got {kind}"
    )
