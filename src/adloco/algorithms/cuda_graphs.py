"""Parts of an inner step as CUDA graphs: each is launched as a whole, not kernel by kernel.

The kernels of a small model take less time than a host needs to launch them one by one. So the
forward and backward pass of a micro-batch is captured once for each shape, and the update (clipping
and the inner optimizers) once. A graph computes on the tensors that it was captured with: gradients
stay where they are, and an update is captured again when one of its tensors is another one.
"""

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from adloco.algorithms.muon_step import Muon
from adloco.algorithms.short_types import ShortAdamW
from adloco.distributed.device import new_stream, pinned, to_device
from adloco.distributed.device_memory import ran_out_of_memory
from adloco.distributed.parallel.gradient_norms import GradientSums

Pass = Callable[[Tensor, Tensor | float], Tensor]
"""(batch on the device, its share of the worker's samples) -> that share of the mean loss, after
the backward pass."""
LARGEST_WORK = 5e11
"""Parameters times elements of a micro-batch, up to which a pass is captured: about there its
kernels take longer than their launches."""
LARGEST_COMPILED_WORK = 5e12
"""Parameters times elements up to which a compiled pass is captured: more, because its calls take
the host longer, and its kernels are faster.
"""
SHARED_WORK = 2e11
"""Parameters times elements, up to which a GPU is faster if it computes the passes of several
workers at once, not one after another."""
MOST_ELEMENTS = 2**14
"""Most elements of a micro-batch whose pass is captured and not compiled, because each worker
keeps the activations of its graphs. Workers whose passes are compiled keep them together."""
CAPTURING = threading.Lock()
"""One thread captures at a time, and none frees cached memory meanwhile; workers in others wait."""


class Lane:
    """Where graphs are captured, and run one after another: a stream, and memory that they share
    because no two of them run at the same time.

    Graphs that do have lanes of their own. cuBLAS keeps a workspace for each stream, so graphs that
    were captured in one stream and run at the same time would overwrite each other's.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = new_stream(device)
        self._device = device
        self._users: WeakSet[CapturedPasses | CapturedUpdate] = WeakSet()
        self.forget()

    def add(self, user: "CapturedPasses | CapturedUpdate") -> None:
        """Count on it to forget its graphs with the others."""
        self._users.add(user)

    def forget(self) -> None:
        """Free all graphs: their memory goes back to the device when none is left, and none that
        failed to be captured keeps it.
        """
        if self.stream:
            self.stream.synchronize()  # They may be running still.
        for user in self._users:
            user.forget()
        self.largest = 0
        """Elements of the largest micro-batch whose pass was captured."""
        self.pool: Any = torch.cuda.graph_pool_handle() if has_graphs(self._device) else None


class Graph:
    """What a function does on a GPU, launched as a whole."""

    def __init__(self, function: Callable[[], Any], lane: Lane) -> None:
        """Capture the function, which is called and computes nothing.

        function: Does the same on each call, with the same tensors.
        """
        self._graph = torch.cuda.CUDAGraph()
        stream, pool = lane.stream, lane.pool
        # Workers in other threads may use the device meanwhile.
        mode = "thread_local"
        try:
            with (
                CAPTURING,
                torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=mode),
            ):
                self.results = function()
        except RuntimeError as error:
            # The end of a capture that failed fails, too, before the allocator is told of it: until
            # then it frees nothing, and memory seems to run out (pytorch issue 180395).
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            if isinstance(error.__context__, RuntimeError | KeyboardInterrupt):
                raise error.__context__ from None  # The cause.
            raise

    def replay(self) -> None:
        """Do what the function did; its results are in `results`."""
        self._graph.replay()


def has_graphs(device: torch.device) -> bool:
    """True if a device has CUDA graphs."""
    return device.type == "cuda"


class CapturedPasses:
    """The forward and backward passes of one worker, by the shape of the micro-batch."""

    def __init__(self, parameters: Sequence[Tensor], lane: Lane, *, compiled: bool) -> None:
        lane.add(self)
        self._lane = lane
        self._parameters = parameters
        self._compiled = compiled
        self._size = sum(parameter.numel() for parameter in parameters)
        self._device = parameters[0].device
        self._gradients: dict[Tensor, Tensor] = {}
        self._passes: dict[Any, _CapturedPass] = {}
        self._most: float = math.inf
        """Elements up to which a capture is tried: fewer than of one for which memory ran out; 0
        after another failure.
        """

    @property
    def attached(self) -> bool:
        """True if the parameters' gradients are the tensors that graphs add to."""
        kept = (each.grad is gradient for each, gradient in self._gradients.items())
        return bool(self._gradients) and all(kept)

    def fit(self, elements: int, *, shared: bool = False) -> bool:
        """True if passes over micro-batches of so many elements can be captured.

        shared: True to ask whether they are computed at once with those of other workers.
        """
        if self._compiled:
            most = 0 if shared else LARGEST_COMPILED_WORK / self._size
        else:
            most = min(MOST_ELEMENTS, (SHARED_WORK if shared else LARGEST_WORK) / self._size)
        return elements <= min(most, self._most)

    def forget(self) -> None:
        """Free the graphs, and the gradients that they add to, which are as large as the model."""
        self._passes.clear()
        self._gradients.clear()

    def run(self, compute: Pass, batch: Tensor, share: float, sums: GradientSums | None) -> Tensor:
        """Compute a pass, as `compute` would; by `compute` itself if its capture fails.

        Args:
            batch: The micro-batch, on the CPU or on the device.
            sums: Takes the squared norm of the gradient of this pass; None: it is not measured.
        """
        key = (batch.shape, batch.dtype, sums is None)
        if key not in self._passes and batch.numel() <= self._most:
            if batch.numel() > self._lane.largest:
                # Memory of smaller ones rarely fits, and would be kept beside it.
                self._lane.forget()
                self._lane.largest = batch.numel()
            try:
                self._passes[key] = self._capture(compute, batch, sums)
            except RuntimeError as error:  # Also for want of memory, of which a graph needs more.
                _warn("passes", error)
                # Half of it may fit.
                self._most = batch.numel() - 1 if ran_out_of_memory(error) else 0
                self._lane.forget()
                if sums:
                    sums.drop()
        if key not in self._passes:
            return compute(to_device(batch, self._device), share)
        # What the step has of gradients so far, if anything, goes where graphs add to.
        unset = [gradient for each, gradient in self._gradients.items() if each.grad is None]
        if unset:
            torch._foreach_zero_(unset)
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not None and parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        return self._passes[key].run(batch, share, sums)

    def _capture(self, compute: Pass, batch: Tensor, sums: GradientSums | None) -> "_CapturedPass":
        own = batch.to(self._device, copy=True)
        share = torch.ones((), device=self._device)
        before = [parameter.grad for parameter in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = None
            compute(own, share)  # Libraries choose their kernels on the first call.
            if sums:
                sums.drop()
            for parameter in self._parameters:
                # A parameter that gets no gradient is not updated either.
                if parameter.grad is not None and parameter not in self._gradients:
                    self._gradients[parameter] = torch.zeros_like(parameter)
            compute(own, share)  # The kernels that add to a gradient.
            if sums:
                sums.drop()
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

            def measured() -> tuple[Tensor, Tensor | None]:
                loss = compute(own, share)
                return loss, sums.take() if sums else None

            graph = Graph(measured, self._lane)
        finally:
            for parameter, own_gradient in zip(self._parameters, before, strict=True):
                parameter.grad = own_gradient
        return _CapturedPass(graph, own, share)


class _CapturedPass:
    """A captured pass, with the tensors that it reads."""

    def __init__(self, graph: Graph, batch: Tensor, share: Tensor) -> None:
        self._graph, self._batch, self._share = graph, batch, share

    def run(self, batch: Tensor, share: float, sums: GradientSums | None) -> Tensor:
        self._batch.copy_(pinned(batch) if self._batch.is_cuda else batch, non_blocking=True)
        self._share.fill_(share)
        self._graph.replay()
        loss, norm_sq = self._graph.results
        if sums:
            sums.add(norm_sq.clone())
        result: Tensor = loss.clone()  # The next replay overwrites it.
        return result


class CapturedUpdate:
    """The update of one worker's parameters by its gradients.

    Learning rates are tensors meanwhile, because a graph keeps the numbers of its capture.
    """

    def __init__(self, optimizers: Sequence[Optimizer], lane: Lane) -> None:
        """optimizers: The worker's inner ones, which `can_capture` accepts."""
        lane.add(self)
        self._optimizers, self._lane = optimizers, lane
        device = self._groups[0]["params"][0].device
        self._rates = torch.zeros(len(self._groups), device=device)
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._graph: Graph | None = None
        self._refused = False
        self._tensors: list[Tensor] = []

    def run(self, update: Callable[[Tensor], None], norm: Tensor) -> None:
        """Update the parameters.

        update: Clips the gradients, whose norm it is given, and steps.
        """
        rates = torch.tensor([group["lr"] for group in self._groups], dtype=torch.float32)
        self._rates.copy_(rates.pin_memory() if norm.is_cuda else rates, non_blocking=True)
        self._norm.copy_(norm)
        tensors = self._all_tensors()
        same = len(tensors) == len(self._tensors) and all(
            one is other for one, other in zip(tensors, self._tensors, strict=True)
        )

        def updated(*, capturable: bool = True) -> None:
            with self._rates_on_device(capturable):
                update(self._norm)

        if not same:  # Among others at the first step, which makes the optimizers' states.
            self._graph = None
        elif self._graph is None and not self._refused:
            try:
                self._graph = Graph(updated, self._lane)
            except RuntimeError as error:
                _warn("updates", error)
                self._refused = True
                self._lane.forget()
        if self._graph:
            self._graph.replay()
        else:
            updated(capturable=False)
            self._tensors = self._all_tensors()

    def forget(self) -> None:
        """Free the graph."""
        self._graph, self._tensors = None, []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The optimizers' groups of parameters; an optimizer that loads a state makes new ones."""
        return [group for each in self._optimizers for group in each.param_groups]

    def _all_tensors(self) -> list[Tensor]:
        """The tensors that an update reads and writes."""
        parameters = [parameter for group in self._groups for parameter in group["params"]]
        states = [state for each in self._optimizers for state in each.state.values()]
        found = [*parameters, *(each.grad for each in parameters)]
        found += [value for state in states for value in state.values()]
        return [each for each in found if isinstance(each, Tensor)]

    @contextlib.contextmanager
    def _rates_on_device(self, capturable: bool) -> Iterator[None]:
        groups = self._groups
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if capturable:  # torch's AdamW asks for it.
                group["capturable"] = True
        try:
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.clear()
                group.update(own)


def can_capture(optimizers: Sequence[Optimizer]) -> bool:
    """True if an update by these optimizers can be captured: by Muon and fused AdamW."""
    return all(
        type(each) is Muon
        or (
            type(each) in (torch.optim.AdamW, ShortAdamW)
            and all(group["fused"] for group in each.param_groups)
        )
        for each in optimizers
    )


def _warn(what: str, error: RuntimeError) -> None:
    reason = " ".join(str(error).split())[:160]
    warnings.warn(f"{what} are launched kernel by kernel: {reason}", stacklevel=3)
