"""The outer step: workers' parameters become one update of the global parameters (DiLoCo, arXiv 2311.08105, algorithm 1; DESIGN section 4).

pseudo_gradient = global - worker, so that descent on it moves towards the workers; averaged over workers with their samples as weights; then any
torch optimizer. The parameters may be cut into fragments that take their steps one after another (Streaming DiLoCo, arXiv 2501.18512).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.optimizers import OuterFactory
from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.buckets import PerWorker, Squares
from adloco.distributed.comm.compressed import Contributions, feedback
from adloco.distributed.comm.local import Comm, Finished, Sum
from adloco.distributed.dtensor import copied, in_memory_of, scattered
from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.errors import require


class OuterStep:
    """Global parameters at the last sync, and the optimizer that moves them; without one, the workers' mean is adopted.

    fragments: places of the parameters that are synced together; all at once unless told. wire: the format in which pseudo-gradients cross, None: as
    they are. on_host: whether global parameters and optimizer state live in host memory, of which a fragment at a time is on the device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        outer: OuterFactory | None,
        *,
        fragments: Sequence[Sequence[int]] | None = None,
        wire: WireFormat | None = None,
        on_host: bool = False,
    ) -> None:
        self.global_params = [nn.Parameter(copied(parameter, to_host=on_host)) for parameter in parameters]
        self.optimizer = outer(self.global_params) if outer else None
        self.fragments = fragments or [range(len(parameters))]
        self._wire = wire

    @property
    def steps_ahead(self) -> bool:
        """Whether workers keep in their parameters what a sync leaves unsent."""
        return feedback(self._wire) == "ahead"

    def step(self, per_worker: PerWorker, weights: Sequence[float], comm: Comm) -> None:
        """Send and receive everything. per_worker: parameters of each local worker; weights: its share of the samples."""
        for fragment in range(len(self.fragments)):
            total = self.send(fragment, per_worker, weights, comm)
            total.transfer()
            self.receive(fragment, total, comm)

    def send(
        self, fragment: int, per_worker: PerWorker, weights: Sequence[float], comm: Comm, residuals: PerWorker = (), overlapped: bool = False
    ) -> Sum:
        """The fragment's mean pseudo-gradient, under way. residuals: of each local worker, like its parameters; see `Contributions`."""
        chosen = [[entry[place] for place in self.fragments[fragment]] for entry in per_worker]
        if self._adopts(comm):
            # Its parameters to the last bit: global - (global - worker) would be rounded.
            return Finished([copied(tensor, to_host=False) for tensor in chosen[0]], Squares.zero(1))
        given = Contributions(
            per_worker=chosen,
            weights=weights,
            origin=[self.global_params[place] for place in self.fragments[fragment]],
            wire=self._wire,
            residuals=[[entry[place] for place in self.fragments[fragment]] for entry in residuals],
        )
        return comm.pseudo_gradient(given, overlapped=overlapped)

    @torch.no_grad()
    def receive(self, fragment: int, total: Sum, comm: Comm) -> None:
        """Move the fragment's global parameters by a sum that has been transferred. comm: that it was sent with."""
        targets = [self.global_params[place] for place in self.fragments[fragment]]
        if self.optimizer is None:
            for target, result in zip(targets, total.result(), strict=True):
                if self._adopts(comm):
                    target.copy_(in_memory_of(result, target))
                else:
                    target.sub_(in_memory_of(result, target))
            return
        for parameter, pseudo_gradient in zip(targets, total.result(), strict=True):
            parameter.grad = in_memory_of(pseudo_gradient, parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _adopts(self, comm: Comm) -> bool:
        """Whether the one worker there is is taken over as it is."""
        return self.optimizer is None and comm.num_workers == 1

    def average(self, per_worker: PerWorker, weights: Sequence[float], comm: Comm) -> None:
        """Make the workers' mean, to the digit, the global parameters, without a step of the optimizer."""
        for fragment in self.fragments:
            means = comm.mean([[entry[place] for place in fragment] for entry in per_worker], weights)
            copy_all(means, [self.global_params[place] for place in fragment])

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict() if self.optimizer else {}
        return {"params": list(self.global_params), "optimizer": optimizer, "feedback": feedback(self._wire)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before, now = state["feedback"], feedback(self._wire)
        require(before == now, f"what is unsent was {before} when the state was saved and is {now} here; give the same error_feedback and step_ahead")
        copy_all(state["params"], self.global_params)
        if self.optimizer:
            load_optimizer(self.optimizer, state["optimizer"])

    def load_optimizer(self, other: "OuterStep") -> None:
        """Take over another's optimizer state."""
        if self.optimizer and other.optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def momentum(self) -> list[Tensor]:
        """The outer optimizer's state tensors, in the order of the parameters."""
        return optimizer_tensors(self.optimizer) if self.optimizer else []


LARGEST = 1e37
"""Norm from which on parameters count as infinite: differences of such float32 numbers, and sums of them, could be."""


def not_finite(names: Sequence[str], params: Sequence[Tensor], add_up: Callable[[Sequence[float]], list[float]] = list) -> str:
    """The first parameter with a number that is not finite, or empty. add_up: over the ranks that hold parts of them."""
    if add_up([squared_norm(params)])[0] < LARGEST**2:
        return ""
    norms = add_up([squared_norm([parameter]) for parameter in params])
    return next(name for name, norm in zip(names, norms, strict=True) if not norm < LARGEST**2 / len(norms))


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers that belong to the model's state (running statistics): averaged at a sync like parameters."""
    names = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in names and buffer.is_floating_point()]


def counters(model: nn.Module) -> list[Tensor]:
    """The other buffers of the model's state, such as a count of batches: each worker's own, saved and not averaged."""
    names = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in names and not buffer.is_floating_point()]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """State tensors of an optimizer, in the order of its parameters and then of their names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]


@torch.no_grad()
def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(in_memory_of(scattered(source, target), target))


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer a copy of a saved state, whose whole tensors are sharded as their parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def placed(value: Any, parameter: Tensor) -> Any:
        return scattered(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value

    states = {index: {key: placed(value, parameters[int(index)]) for key, value in entry.items()} for index, entry in saved["state"].items()}
    # How the step is computed belongs to the placement, not to the state: fused kernels know no sharded tensors.
    own = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in optimizer.param_groups]
    groups = [{**group, **kept} for group, kept in zip(saved["param_groups"], own, strict=True)]
    optimizer.load_state_dict(copy.deepcopy({**saved, "state": states, "param_groups": groups}))  # torch would keep the given tensors.
