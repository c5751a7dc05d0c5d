"""The outer step: workers' parameters become one update of the global parameters (DiLoCo, arXiv 2311.08105, algorithm 1; DESIGN section 4).

pseudo_gradient = global - worker, so that descent on it moves towards the workers; averaged over workers with their samples as weights; then any
torch optimizer. Also `DiLoCo`, the same step for a training loop of one's own.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.optimizers import OuterFactory
from adloco.placement.comm import Comm, LocalComm, PerWorker, Traffic
from adloco.rules.checks import require


class OuterStep:
    """Global parameters at the last sync, and the optimizer that moves them; without one, the workers' mean is adopted as it is."""

    def __init__(self, parameters: Sequence[Tensor], outer: OuterFactory | None) -> None:
        self.global_params = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        self.optimizer = outer(self.global_params) if outer else None

    @torch.no_grad()
    def step(self, per_worker: PerWorker, weights: Sequence[float], comm: Comm) -> None:
        """Move the global parameters. per_worker: parameters of each local worker; weights: samples behind each."""
        if self.optimizer is None:
            copy_all(comm.mean(per_worker, weights), self.global_params)
            return
        differences = [[mine - theirs for mine, theirs in zip(self.global_params, entry, strict=True)] for entry in per_worker]
        for parameter, pseudo_gradient in zip(self.global_params, comm.mean(differences, weights), strict=True):
            parameter.grad = pseudo_gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"params": list(self.global_params), "optimizer": self.optimizer.state_dict() if self.optimizer else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        copy_all(state["params"], self.global_params)
        if self.optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would keep the given tensors.

    def load_optimizer(self, other: "OuterStep") -> None:
        """Take over another's optimizer state."""
        if self.optimizer and other.optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def momentum(self) -> list[Tensor]:
        """The outer optimizer's state tensors, in the order of the parameters."""
        return optimizer_tensors(self.optimizer) if self.optimizer else []


class DiLoCo:
    """The outer step in a loop of your own: call `step()` after each inner optimizer step.

    models: the replicas in this process, one per worker, with inner optimizers of yours. Their trainable parameters are set to those of the
    first at the start and to the new global parameters at every sync. Floating-point buffers are averaged.
    """

    def __init__(self, models: nn.Module | Sequence[nn.Module], *, outer: OuterFactory | None, sync_every: int, comm: Comm | None = None) -> None:
        require(sync_every >= 1, f"sync_every must be >= 1, got {sync_every}")
        self.models = [models] if isinstance(models, nn.Module) else list(models)
        self.sync_every = sync_every
        self.traffic = Traffic()
        self._comm = comm or LocalComm(len(self.models), self.traffic)
        self._outer = OuterStep(trainable(self.models[0]), outer)
        self._samples = [0.0] * len(self.models)
        self._inner_steps = 0
        self._load()

    def step(self, samples: Sequence[float] | None = None) -> bool:
        """Count one inner step of every replica; at each `sync_every`-th, sync and return True.

        samples: what each replica trained on in this step; they weight its pseudo-gradient. Equal by default.
        """
        counts = [1.0] * len(self.models) if samples is None else samples
        require(len(counts) == len(self.models), f"samples must have one number for each of {len(self.models)} models, got {len(counts)}")
        self._samples = [before + count for before, count in zip(self._samples, counts, strict=True)]
        self._inner_steps += 1
        if self._inner_steps % self.sync_every:
            return False
        self._outer.step([trainable(model) for model in self.models], self._samples, self._comm)
        means = self._comm.mean([averaged_buffers(model) for model in self.models], self._samples)
        for model in self.models:
            copy_all(means, averaged_buffers(model))
        self._load()
        self._samples = [0.0] * len(self.models)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The outer step's state; models and inner optimizers are yours to save."""
        return {"outer": self._outer.state_dict(), "samples": list(self._samples), "inner_steps": self._inner_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(state["outer"])
        self._samples, self._inner_steps = list(state["samples"]), state["inner_steps"]

    def _load(self) -> None:
        for model in self.models:
            copy_all(self._outer.global_params, trainable(model))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that take gradients, tied ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers that belong to the model's state (running statistics): averaged at a sync like parameters."""
    names = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in names and buffer.is_floating_point()]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """State tensors of an optimizer, in the order of its parameters and then of their names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]


@torch.no_grad()
def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
