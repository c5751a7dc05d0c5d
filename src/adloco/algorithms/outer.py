"""The outer step: workers' parameters become one update of the global parameters (DiLoCo, arXiv 2311.08105, algorithm 1; DESIGN section 4).

pseudo_gradient = global - worker, so that descent on it moves towards the workers; averaged over workers with their samples as weights; then any
torch optimizer.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.optimizers import OuterFactory
from adloco.placement.comm import Comm, PerWorker
from adloco.placement.shards import scattered


class OuterStep:
    """Global parameters at the last sync, and the optimizer that moves them; without one, the workers' mean is adopted as it is."""

    def __init__(self, parameters: Sequence[Tensor], outer: OuterFactory | None) -> None:
        self.global_params = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        self.optimizer = outer(self.global_params) if outer else None

    @torch.no_grad()
    def step(self, per_worker: PerWorker, weights: Sequence[float], comm: Comm) -> None:
        """Move the global parameters. per_worker: parameters of each local worker; weights: its share of the samples."""
        if self.optimizer is None:
            copy_all(comm.mean(per_worker, weights), self.global_params)
            return
        for parameter, pseudo_gradient in zip(self.global_params, comm.mean(per_worker, weights, origin=self.global_params), strict=True):
            parameter.grad = pseudo_gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"params": list(self.global_params), "optimizer": self.optimizer.state_dict() if self.optimizer else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        target.copy_(scattered(source, target))


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
