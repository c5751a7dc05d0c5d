"""A worker like those of the run, for probes: it trains steps of any size, and is then discarded.

It is built as the run does (sharded, replicated), on a whole island: all ranks call it alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from threading import Event

from adloco.algorithms.method import Execution, Problem, Source
from adloco.algorithms.round_task import RoundTask
from adloco.algorithms.worker import InnerSettings, Worker
from adloco.distributed.device_memory import free_memory
from adloco.errors import OutOfMemoryError
from adloco.rules.switch import BatchPlan
from adloco.run.memory_use import forget_peak, held_bytes, usage
from adloco.run.opened import Opened


class ProbeWorker:
    """A worker whose memory and seconds are measured while it trains steps."""

    def __init__(
        self, opened: Opened, data: Source, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            opened: The recipe whose worker it is.
            data: Samples to train on.
            clock: () -> seconds since some fixed moment.
        """
        recipe, placement, builder = opened.recipe, opened.placement, opened.builder
        self._device = placement.device
        self._ranks = placement.ranks_per_worker
        free_memory(self._device)
        self._before = held_bytes(self._device)
        settings = InnerSettings(
            problem=Problem(build_model=builder, loss_fn=opened.task.loss, data=data),
            max_grad_norm=recipe.method.max_grad_norm,
            rule=recipe.batch,
            test=replace(recipe.test, steps=1, step="first"),
            execution=Execution(autocast=opened.precision, seed=recipe.run.seed, clock=clock),
            device=self._device,
            syncing=recipe.syncing,
        )
        model = builder()
        engine = placement.engine(model, recipe.run.compile, builder.filling)
        self._worker = Worker(0, model, recipe.inner, settings, engine)
        # The first step of a round may measure gradient statistics, with smaller micro-batches but
        # perhaps with a second copy of the gradients; the second step is a plain one.
        self._steps = 2 if recipe.batch.fewest_groups > 1 else 1
        self._train(1, [self._steps])  # The first step creates the optimizer state.

    def peak(self, size: int) -> tuple[int, float]:
        """(peak bytes, seconds) of a step with micro-batches of this size.

        Raises:
            OutOfMemoryError: Memory ran out.
        """
        free_memory(self._device)
        forget_peak(self._device)
        (seconds,) = self._train(size, [self._steps])
        return usage(self._device)[0] - self._before, seconds / self._steps

    def step_seconds(self, size: int, count: int) -> list[float]:
        """Seconds of each of `count` steps with micro-batches of this size on every rank.

        A plain step that warms up comes before them, and before it the step that measures gradient
        statistics, if the recipe's rule needs any.

        Raises:
            OutOfMemoryError: Memory ran out.
        """
        free_memory(self._device)
        return self._train(size, range(self._steps, self._steps + count + 1))[1:]

    def _train(self, size: int, ends: Sequence[int]) -> list[float]:
        """Train a round, in parts that end after so many steps; return the seconds of each part."""
        plan = BatchPlan(micro_batches=(size,) * self._ranks, ranks=self._ranks)
        task = RoundTask(
            trainer=0,
            plan=plan,
            inner_steps=ends[-1],
            first_step=0,
            lr_factor=lambda step: 0.0,  # The same work, and no loss that diverges.
            start=(),
        )
        self._worker.begin_round()
        self._worker.halving.limit = 0
        until = [0.0]
        for end in ends:
            self._worker.advance(task, end, Event())
            until.append(self._worker.round.busy_seconds)
        if self._worker.halving.limit:
            raise OutOfMemoryError("the worker repeated the step with smaller micro-batches")
        return [after - before for before, after in pairwise(until)]
