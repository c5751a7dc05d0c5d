"""DiLoCo (arXiv 2311.08105) in a training loop of one's own: the outer step, called after each inner optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adloco.algorithms.optimizers import OuterFactory
from adloco.algorithms.outer import OuterStep, averaged_buffers, copy_all, not_finite
from adloco.algorithms.streaming import FragmentSyncs, Served
from adloco.algorithms.worker import ADVICE, NonFiniteLossError
from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.compressed import keeps_residuals
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.parallel.layers import layers
from adloco.distributed.placement.one_process import OneProcess, Placement
from adloco.errors import require
from adloco.rules.sync_schedule import Streaming, SyncEvent


class DiLoCo:
    """The outer step in a loop of your own: call `step()` after each inner optimizer step.

    models: the replicas in this process, one per worker that lives here, with inner optimizers of yours. Their trainable parameters are set to those
    of the first worker at the start and to the new global parameters at every sync. Floating-point buffers are averaged. wire: format in which
    pseudo-gradients cross, None: as they are. streaming: how a sync is spread over the steps of a round; its layers are those of the first model.
    With either, replicas may stand apart after a sync too: see `settle`. outer_on_host: whether global parameters and outer optimizer state live in
    host memory. placement, num_workers: where all workers of the run live, from `place`; by default those in `models` are all there are.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        *,
        outer: OuterFactory | None,
        sync_every: int,
        wire: WireFormat | None = None,
        streaming: Streaming | None = None,
        outer_on_host: bool = False,
        placement: Placement | None = None,
        num_workers: int | None = None,
    ) -> None:
        require(sync_every >= 1, f"sync_every must be >= 1, got {sync_every}")
        self.models = [models] if isinstance(models, nn.Module) else list(models)
        self.sync_every = sync_every
        self.placement = placement or OneProcess()
        self.num_workers = num_workers or len(self.models)
        self._here = self.placement.local(range(self.num_workers))
        require(len(self.models) == len(self._here), f"models must be one for each of the {len(self._here)} workers here, got {len(self.models)}")
        self._comm = self.placement.comm(range(self.num_workers))
        self._streaming = streaming or Streaming()
        fragments, params = self._streaming.cut(layers(self.models[0]), sync_every), trainable(self.models[0])
        self._outer = OuterStep(params, outer, fragments=fragments, wire=wire, on_host=outer_on_host)
        kept = self.models if keeps_residuals(wire) else []
        self._residuals = [[zeros_like(tensor, torch.float32, to_host=outer_on_host) for tensor in params] for _ in kept]
        self._syncs = FragmentSyncs(self._streaming, self.placement)
        first = self._comm.broadcast(self._outer.global_params, source=0, receivers=range(1, self.num_workers))
        copy_all(first, self._outer.global_params)
        self._samples = [[0.0] * len(self.models) for _ in [*self._outer.fragments, self.models]]
        """Of each model since each fragment was sent, and last since buffers were averaged."""
        self._counted = False
        self._inner_steps = 0
        self._fragment = 0
        """Sent last."""
        self._sent_weights: list[float] = []
        self._round_weights: list[float] = []
        for model in self.models:
            copy_all(self._outer.global_params, trainable(model))

    def step(self, samples: Sequence[float] | None = None) -> bool:
        """Count one inner step of every replica; return True at each `sync_every`-th, which ends a round with its sync (or its last one).

        samples: what each replica here trained on in this step; they weight its pseudo-gradient. Equal by default; given on all ranks or on none.
        """
        counts = [1.0] * len(self.models) if samples is None else samples
        require(len(counts) == len(self.models), f"samples must have one number for each of {len(self.models)} models, got {len(counts)}")
        self._samples = [[before + count for before, count in zip(own, counts, strict=True)] for own in self._samples]
        self._counted = self._counted or samples is not None
        self._inner_steps += 1
        now = (self._inner_steps - 1) % self.sync_every + 1
        for event in self._streaming.events(self.sync_every):
            if event.step == now:
                self._handle(event)
        if now < self.sync_every:
            return False
        self._round_weights = self._take_weights(-1)
        means = self._comm.mean([averaged_buffers(model) for model in self.models], self._round_weights)
        for model in self.models:
            copy_all(means, averaged_buffers(model))
        return True

    def _handle(self, event: SyncEvent) -> None:
        if event.kind == "send":
            self._check_finite()
            self._fragment, self._sent_weights = event.fragment, self._take_weights(event.fragment)
        served = Served(
            trainer=0,
            outer=self._outer,
            params=[trainable(model) for model in self.models],
            residuals=self._residuals,
            weights=self._sent_weights,
            comm=self._comm,
        )
        self._syncs.handle(event, [served])

    def settle(self) -> None:
        """Bring all replicas to their mean, where streaming or a step ahead leaves them apart at a round's end. Called on all ranks, then.

        Weights are the samples since the last round's end: what a replica without any has not sent is dropped.
        """
        require(self._inner_steps % self.sync_every == 0, "a round is under way; settle after a step that returned True")
        if (self._streaming.drifts or self._outer.steps_ahead) and self._inner_steps > 0:
            params = [trainable(model) for model in self.models]
            self._outer.average(params, self._round_weights, self._comm)
            for own in params:
                copy_all(self._outer.global_params, own)

    def _check_finite(self) -> None:
        for worker, model in zip(self._here, self.models, strict=True):
            name = not_finite([name for name, parameter in model.named_parameters() if parameter.requires_grad], trainable(model))
            if name:
                raise NonFiniteLossError(f"parameter {name} is not finite in worker {worker}, inner step {self._inner_steps}; {ADVICE}")

    def state_dict(self) -> dict[str, Any]:
        """The outer step's state; models and inner optimizers are yours to save. Called on all ranks after the same step."""
        self._syncs.arrive(self._fragment)
        return {
            "outer": self._outer.state_dict(),
            "residuals": self._residuals,
            "samples": self._samples,
            "counted": self._counted,
            "round_weights": self._round_weights,
            "inner_steps": self._inner_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._syncs.forget()
        self._outer.load_state_dict(state["outer"])
        for mine, saved in zip(self._residuals, state["residuals"], strict=True):
            copy_all(saved, mine)
        self._samples, self._counted, self._inner_steps = list(state["samples"]), state["counted"], state["inner_steps"]
        self._round_weights = list(state["round_weights"])

    def _take_weights(self, which: int) -> list[float]:
        """Shares of the samples counted there, which begins anew."""
        counts, self._samples[which] = self._samples[which], [0.0] * len(self.models)
        if not self._counted:
            return [1 / self.num_workers] * len(self.models)
        everyone = self.placement.gather({worker: [count] for worker, count in zip(self._here, counts, strict=True)})
        total = sum(count for (count,) in everyone.values())
        require(total > 0, "samples must not be 0 on every worker for all steps of a round")
        return [count / total for count in counts]
