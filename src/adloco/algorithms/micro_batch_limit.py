"""Halved micro-batches after memory has run out.

A worker repeats a step that ran out on the same samples, in micro-batches of half the size. After
the round, all workers of the run take the smallest micro-batches that any of them needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from adloco.algorithms.cuda_graphs import CAPTURING
from adloco.algorithms.reports import Change
from adloco.algorithms.stage import Stage
from adloco.distributed.device_memory import free_memory, ran_out_of_memory
from adloco.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from adloco.algorithms.reports import RoundReport
    from adloco.algorithms.round_parts import RoundParts
    from adloco.algorithms.run_state import RunState
    from adloco.rules.switch import BatchPlan


class Halving:
    """Repeats the steps of one worker in smaller micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.limit = 0
        """Largest micro-batch since memory has run out; 0: no limit."""
        self._device = device

    def run(
        self, plan: BatchPlan, compute: Callable[[BatchPlan], Tensor], undo: Callable[[], None]
    ) -> Tensor:
        """Compute a step with the micro-batches of a plan, or with smaller ones.

        undo: Puts back what an attempt has changed.

        Raises:
            OutOfMemoryError: Not even one sample fits, or several ranks compute the step together.
        """
        while True:
            plan = plan.at_most(self.limit) if self.limit else plan
            try:
                return compute(plan)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                self.limit = plan.micro_batch // 2
                # The other ranks of an island are in the middle of the step: it cannot be repeated.
                if plan.ranks > 1 or self.limit == 0:
                    advice = (
                        f"set switch.pass_limit {self.limit}"
                        if self.limit
                        else "one sample does not fit; make the model or the samples smaller"
                    )
                    where = f"with micro-batches of {plan.micro_batch} on {self._device}"
                    raise OutOfMemoryError(
                        f"memory ran out {where}; {advice}", self.limit
                    ) from error
            # Outside the except block: there the error would keep the tensors of its frames alive.
            undo()
            with CAPTURING:
                free_memory(self._device)


class SmallestOfAll(Stage):
    """Brings the limit of one worker to all, whose plans contain it from the next round on."""

    key = "halving"

    def __init__(self, parts: RoundParts, state: RunState) -> None:
        self._parts, self._state = parts, state

    def report(self, report: RoundReport) -> RoundReport:
        before = self._parts.batching.switch.at_most(self._state.pass_limit).at_once
        here = [worker.halving.limit or before for worker in self._state.workers.values()]
        after = -int(self._parts.placement.largest(-min(here)))
        if after >= before:
            return report
        self._state.pass_limit = after
        ran_out = Change(setting="pass_limit", before=before, after=after, reason="memory ran out")
        return replace(report, changes=(*report.changes, ran_out))
