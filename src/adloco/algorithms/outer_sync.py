"""The outer step: the workers' parameters become one update of the global parameters.

DiLoCo (arXiv 2311.08105, algorithm 1): pseudo_gradient = global - worker, so that descent on it
moves towards the workers. It is averaged over the workers, with their samples as weights unless
`outer.weights` or a stage gives others (`fill_weighted` in comm/buckets.py, for the wire formats
comm/compressed.py), and any torch optimizer, which `optimizers.OuterOptimizer` makes, takes a step
with it. Then the workers start from the new global parameters. The parameters may be cut into
fragments that are synced one after another while training continues (Streaming DiLoCo, arXiv
2501.18512), by the events of `rules/sync_schedule.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Syncing
from adloco.algorithms.model_state import Replica, copy_all
from adloco.algorithms.optimizer_state import load_optimizer, optimizer_tensors, saved_optimizer
from adloco.algorithms.optimizers import require_all
from adloco.algorithms.short_types import is_short
from adloco.distributed.comm.buckets import Contributions, rounded_origin, sum_dtype, together
from adloco.distributed.comm.comm import Comm, Work
from adloco.distributed.comm.sync_stats import SumStats
from adloco.distributed.dtensor import converted, copied, in_memory_of, local
from adloco.distributed.wire.wire_format import check_format
from adloco.errors import require
from adloco.rules.sync_schedule import SyncEvent


class OuterSync:
    """Global parameters as of the last sync, and the optimizer that moves them."""

    def __init__(
        self, replica: Replica, syncing: Syncing, fragments: Sequence[Sequence[int]] | None = None
    ) -> None:
        """
        Args:
            replica: A worker whose parameters are copied as the first global parameters.
            fragments: For each fragment, the indices of the parameters that are synced together;
                None: one fragment with all parameters.
        """
        memory, streaming = syncing.memory, syncing.streaming
        require(
            not (streaming.mixes and any(map(is_short, replica.params))),
            f"streaming.alpha {streaming.own_weight:g} mixes parameters of two bytes, whose "
            "rounding takes back small steps; use model.dtype fp32 (run.precision bf16 computes in "
            "bf16 all the same), or streaming.alpha 0 or 1",
        )
        copies = (
            copied(each, device=memory.place(local(each).device), dtype=sum_dtype(each.dtype))
            for each in replica.params
        )
        self.global_params = [nn.Parameter(each) for each in copies]
        self.buffers = [buffer.clone() for buffer in replica.buffers]
        if syncing.wire:
            check_format(syncing.wire, local(replica.params[0]).device)
        self.syncing = syncing
        self.reset_optimizer()
        if syncing.outer:
            built = [self.optimizer] if self.optimizer else []  # It may forget its return.
            require_all(built, replica.names, self.global_params, "outer")
        self.fragments = fragments or [range(len(replica.params))]
        self._in_flight: tuple[int, Work] | None = None

    def sync(
        self, event: SyncEvent, replicas: Sequence[Replica], weights: Sequence[float], comm: Comm
    ) -> SumStats | None:
        """Carry out an event of the schedule: start a fragment's mean, finish it, or both.

        Args:
            replicas: The local workers of the trainer.
            weights: Each one's weight, usually its share of the trainer's samples; over all ranks
                they add up to 1. Not used to finish a mean.

        Returns:
            What the mean has cost, once it is finished.
        """
        if event.kind in ("sync", "send"):
            self.start(event, replicas, weights, comm)
        if event.kind in ("sync", "receive"):
            stats = self.step()
            self.copy_to_workers(event.fragment, replicas)
            return stats
        return None

    def start(
        self, event: SyncEvent, replicas: Sequence[Replica], weights: Sequence[float], comm: Comm
    ) -> None:
        """Start the mean of the workers' pseudo-gradients, global - worker, in the wire format."""
        fragment = event.fragment
        per_worker = [self._pick(fragment, replica.params) for replica in replicas]
        global_params = self._pick(fragment, self.global_params)
        if self.optimizer is None and comm.num_workers == 1:
            # A copy is exact, and global - (global - worker) would be rounded.
            copy_all(per_worker[0], global_params)
            return
        residuals = [
            self._pick(fragment, replica.residuals) for replica in replicas if replica.residuals
        ]
        given = Contributions(
            per_worker=per_worker,
            weights=weights,
            origin=global_params,
            wire=self.syncing.wire,
            feedback=self.syncing.feedback,
            residuals=residuals,
        )
        # Nobody waits here: with streaming, training continues until `step` asks for the mean.
        self._in_flight = fragment, comm.start_mean(given, overlapped=event.kind == "send")

    @torch.no_grad()
    def step(self) -> SumStats | None:
        """Wait for the mean in flight, and take the outer step with it; return what it has cost.

        Does nothing if no mean is in flight.
        """
        if self._in_flight is None:
            return None
        (fragment, work), self._in_flight = self._in_flight, None
        params = self._pick(fragment, self.global_params)
        pseudo_gradients = [
            in_memory_of(pseudo_gradient, parameter)
            for parameter, pseudo_gradient in zip(params, work.wait(), strict=True)
        ]
        if self.optimizer is None:  # global - mean(global - worker) is the workers' mean.
            here, differences = [*map(local, params)], [*map(local, pseudo_gradients)]
            for part in together(here):
                torch._foreach_sub_(here[part], differences[part])
        else:
            # Parameters of other fragments have no grad, and torch's optimizers leave those alone.
            for parameter, pseudo_gradient in zip(params, pseudo_gradients, strict=True):
                parameter.grad = pseudo_gradient
            self.optimizer.step()
            for parameter in params:
                parameter.grad = None
        return work.stats

    @torch.no_grad()
    def copy_to_workers(self, fragment: int, replicas: Sequence[Replica]) -> None:
        """Set a fragment of the local workers to the new global parameters.

        A worker that keeps a residual has it in its parameters: its new values are the global ones
        less the residual, in which what rounding to the worker's type leaves out remains. The
        result is alpha x the worker's own parameters + (1 - alpha) x these values.
        """
        starts = [local(each) for each in self._pick(fragment, self.global_params)]
        per_worker = [
            [local(each) for each in self._pick(fragment, replica.params)] for replica in replicas
        ]
        residuals = [
            [local(each) for each in replica.residuals and self._pick(fragment, replica.residuals)]
            for replica in replicas
        ]
        own_weight = self.syncing.streaming.own_weight
        for part in together(per_worker[0]):
            # Once for all workers: they may come from host memory.
            here = [start.to(per_worker[0][part.start].device) for start in starts[part]]
            for params, left in zip(per_worker, residuals, strict=True):
                _start_from(here, params[part], left[part], own_weight)

    @torch.no_grad()
    def average_buffers(
        self, replicas: Sequence[Replica], weights: Sequence[float], comm: Comm
    ) -> None:
        """Set the local workers' buffers to the mean over all workers.

        It is taken in float64, in which equal values stay as they are, and the largest ones finite.
        """
        for replica in replicas:
            for before, now in zip(self.buffers, replica.buffers, strict=True):
                require(
                    now.shape == before.shape,
                    "floating-point buffers must keep their shapes, and one of shape "
                    f"{tuple(before.shape)} has {tuple(now.shape)} now; if the first pass gives it "
                    "its shape, let the model make that pass before training begins",
                )
        if self.buffers:
            exact = [[buffer.double() for buffer in replica.buffers] for replica in replicas]
            copy_all(comm.mean(exact, weights), self.buffers)
        for replica in replicas:
            copy_all(self.buffers, replica.buffers)

    def copy_all_to_workers(self, replicas: Sequence[Replica]) -> None:
        """Set the local workers to the global parameters and the averaged buffers; what they have
        not sent is dropped.
        """
        for replica in replicas:
            copy_all(self.parameters(), [*replica.params, *replica.buffers])
            for residual in replica.residuals:
                residual.zero_()

    def discard_in_flight(self) -> None:
        """Wait for a mean in flight, because the other ranks wait for it too, and drop it."""
        if self._in_flight is not None:
            self._in_flight[1].wait()
        self._in_flight = None

    def parameters(self) -> list[Tensor]:
        """Global parameters and averaged buffers."""
        return [*self.global_params, *self.buffers]

    def reset_optimizer(self) -> None:
        """Make the outer optimizer, or make it again: with all that it has at the start."""
        outer = self.syncing.outer
        self.optimizer = outer(self.global_params) if outer else None

    def momentum(self) -> list[Tensor]:
        """The outer optimizer's state tensors, in the order of the parameters; maybe none."""
        return optimizer_tensors(self.optimizer) if self.optimizer else []

    def state_dict(self) -> dict[str, Any]:
        """The state by name, with live tensors. Complete only if no mean is in flight."""
        return {
            "params": list(self.global_params),
            "buffers": list(self.buffers),
            "optimizer": saved_optimizer(self.optimizer) if self.optimizer else {},
            "feedback": self.syncing.residuals,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; ValueError if it was saved with other error feedback, or is
        that of another model.
        """
        before, now = state["feedback"], self.syncing.residuals
        require(
            before == now,
            f"error feedback was {before!r} when the state was saved and is {now!r} here; give the "
            "same wire format and feedback",
        )
        saved = [*state["params"], *state["buffers"]]
        require(  # A copy would repeat a smaller tensor, and torch take its momentum as it is.
            [each.shape for each in saved] == [each.shape for each in self.parameters()],
            "the state is that of a model with other trainable parameters or averaged buffers; "
            "load it with the model that it was saved with",
        )
        if self.optimizer:  # First, because it may refuse its state.
            load_optimizer(self.optimizer, state["optimizer"])
        copy_all(state["params"], self.global_params)
        copy_all(state["buffers"], self.buffers)

    def _pick(self, fragment: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] for index in self.fragments[fragment]]


def _start_from(
    starts: list[Tensor], params: list[Tensor], residuals: list[Tensor], own_weight: float
) -> None:
    """Set a worker's parameters, and its residuals if it keeps any, to start from the global ones;
    see `OuterSync.copy_to_workers`.
    """
    exact = starts[0].dtype
    if residuals:
        # The next difference is taken from the origin as the worker's type has it, so the residual
        # must be, too: otherwise each sync would lose a rounding.
        rounded = converted(rounded_origin(starts, params), exact)
        starts = [*torch._foreach_sub(rounded, converted(residuals, exact, params[0].device))]
    if own_weight:
        starts = [*torch._foreach_lerp(converted(params, exact), starts, 1 - own_weight)]
    torch._foreach_copy_(params, starts)
    if residuals:
        # In bf16 the copy has lost up to 1/256 of each value; it is sent next time.
        torch._foreach_copy_(residuals, torch._foreach_sub(converted(params, exact), starts))
