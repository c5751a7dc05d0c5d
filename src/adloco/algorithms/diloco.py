"""DiLoCo (arXiv 2311.08105) for your own training loop, which calls it after each inner step."""

import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.method import OuterMemory, Syncing
from adloco.algorithms.model_state import (
    Replica,
    check_apart,
    check_filled,
    copy_all,
    share_memory,
    state_buffers,
)
from adloco.algorithms.optimizers import OuterFactory, OuterOptimizer, check_shards
from adloco.algorithms.outer_sync import OuterSync
from adloco.algorithms.replica_checks import (
    check_alike,
    check_islands,
    check_same_shards,
    check_wrappers,
    warn_if_alike,
)
from adloco.distributed.dtensor import shard_of
from adloco.distributed.launch.launcher import alone
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.parallel.layers import free_gathered, layers, written_tensors
from adloco.distributed.placement.placement import Placement
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.wire_format import WireFormat
from adloco.errors import require
from adloco.rules.sync_schedule import Streaming


class DiLoCo:
    """DiLoCo for your own training loop: call `step()` after each inner optimizer step.

    At the start, all parameters and buffers of the replicas, frozen parameters, counters and
    buffers outside of `state_dict()` too, are set to those of worker 0. At every sync, trainable
    parameters are set to the new global parameters. At the end of every round, floating-point
    buffers of `state_dict()` are set to their mean. Parameters stay trainable or frozen, and the
    same objects, for as long as the `DiLoCo` is used.

    Args:
        models: The replicas in this process, one for each worker that lives here (a list or a
            ModuleList, or one model). Their inner optimizers are yours.
        outer: Builds the outer optimizer; None: the workers' mean becomes the global parameters.
            By default it is that of the paper: SGD with a rate of 0.7 and a Nesterov momentum of
            0.9.
        sync_every: H, the inner steps of a round.
        wire: Wire format of pseudo-gradients; None: they are sent uncompressed.
        feedback: What becomes of what the wire format leaves unsent; None: `Feedback()`.
        streaming: The schedule of syncs within a round, with fragments made of the first model's
            layers; None: one sync at the end. With streaming, or with a lossy wire format, replicas
            may differ after a sync too: see `load_global`.
        memory: Where global parameters, outer optimizer state and residuals are kept.
        placement: Where all workers of the run live, from `place`; None: in this process, where it
            is not one of several ranks.

    Raises:
        ValueError: The settings do not fit together or do not fit the models.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        *,
        outer: OuterFactory | None = OuterOptimizer(),  # noqa: B008 (it is frozen)
        sync_every: int,
        wire: WireFormat | None = None,
        feedback: Feedback | None = None,
        streaming: Streaming | None = None,
        memory: OuterMemory | None = None,
        placement: Placement | None = None,
    ) -> None:
        whole = hasattr(sync_every, "__float__") and sync_every >= 1 and sync_every % 1 == 0
        require(whole, f"sync_every must be a whole number >= 1, got {sync_every!r}")
        if isinstance(models, nn.Module) and type(models) is not nn.ModuleList:
            models = [models]
        self.models: list[nn.Module] = [*models]
        require(bool(self.models), "models must have at least one model, got none")
        for model in self.models:
            require(isinstance(model, nn.Module), f"models must be modules, got {type(model)}")
            free_gathered(model)
        self.sync_every = int(sync_every)  # See `step`.
        self.placement = placement or alone()
        workers = self.placement.workers or range(len(self.models))
        self.num_workers = len(workers)
        self._here = self.placement.local(workers)
        # On its island, whose ranks have other shards, and count samples of their own.
        self._rank = self.placement.rank % self.placement.ranks_per_worker
        require(
            len(self.models) == len(self._here),
            f"models must have one model for each of the {len(self._here)} workers here, "
            f"got {len(self.models)}",
        )
        self._syncing = Syncing(
            outer=outer,
            wire=wire,
            feedback=feedback or Feedback(),
            streaming=streaming or Streaming(),
            memory=memory or OuterMemory(),
        )
        check_wrappers(self.models, self.placement)
        self._schedule = [self.sync_every, str(self._syncing.streaming)]
        sent = "none"
        if wire:
            sent = f"{type(wire).__name__}, {wire.block_bytes} bytes for {wire.block} values"
        shared = {
            "the outer optimizer": str(outer if isinstance(outer, OuterOptimizer) else type(outer)),
            "sync_every": str(sync_every),
            "streaming": str(self._syncing.streaming),
            "the wire format": sent,
            "error feedback": str(self._syncing.feedback),
        }
        check_alike(dict(zip(self._here, self.models, strict=True)), shared, self.placement)
        check_same_shards(self.models, self.placement)
        first = self.models[0]
        params = trainable(first)
        require(bool(params), "models must have parameters that require gradients, and have none")
        for model in self.models:
            check_filled(model)
        check_apart(self.models)
        fragments = self._syncing.streaming.cut(layers(first), sync_every)
        require(
            not share_memory([params[index] for index in fragment] for fragment in fragments),
            "two parameters in one memory would be synced in two fragments; tie them by assigning "
            "the parameter itself, not its data",
        )
        self._comm = self.placement.comm(workers)
        # Buffers outside of the state, too: replicas may have drawn random ones.
        tensors = [[*written_tensors(model).values()] for model in self.models]
        start = self._comm.broadcast(tensors[0], source=workers[0], receivers=workers[1:])
        for own in tensors:
            copy_all(start, own)
        self._replicas = [Replica.of(model, self._syncing.residuals_in) for model in self.models]
        self._outer = OuterSync(self._replicas[0], self._syncing, fragments)
        if self._outer.optimizer:
            check_shards([self._outer.optimizer], self.placement.shards)
        self._samples = [[0.0] * len(self.models) for _ in [*fragments, "round"]]
        """Samples of each model: a list for each fragment since it was sent last, and one list
        since the round began."""
        self._counted = False
        self._inner_steps = 0

    def step(self, samples: Sequence[float] | None = None) -> bool:
        """Count one inner step of every replica, and sync when the schedule says so.

        Args:
            samples: Samples that each replica in this process trained on in this step, as weights
                of the pseudo-gradients; those of the ranks that serve one worker are added up.
                None: equal weights. Give them at every step, on all ranks, or never.

        Returns:
            True if this step has ended a round: every `sync_every`-th one, after its last sync.

        Raises:
            NonFiniteLossError: A replica's parameters are not finite at a sync.
            ValueError: `samples` does not fit, or a model has other trainable parameters than at
                the start. As after the error above, the step is not counted.
        """
        # Python's floats: bf16 counts no further than 256, and torch.load refuses those of NumPy.
        counts = [1.0] * len(self.models) if samples is None else [float(each) for each in samples]
        require(
            len(counts) == len(self.models),
            f"samples must have one number for each of {len(self.models)} models, "
            f"got {len(counts)}",
        )
        require(
            all(0 <= count < math.inf for count in counts),
            f"samples must be numbers of samples, >= 0 and finite, got {counts}",
        )
        given = samples is not None
        require(
            given == self._counted or self._inner_steps == 0,
            "samples must be given at every step or never, because a step without them counts as "
            f"one sample; inner step {self._inner_steps + 1} has {'some' if given else 'none'}",
        )
        now = self._inner_steps % self.sync_every + 1
        schedule = self._syncing.streaming.events(self.sync_every)
        events = [each for each in schedule if each.step == now]
        if events:  # Before the step counts, so that it can be repeated after an error.
            self._require_same_parameters()
            for worker, replica in zip(self._here, self._replicas, strict=True):
                replica.require_finite(f"worker {worker}, inner step {self._inner_steps + 1}")
            if self._inner_steps + 1 == schedule[0].step:
                warn_if_alike(self._replicas, self._outer.global_params, self.placement)
        self._counted = given
        self._samples = [
            [before + count for before, count in zip(own, counts, strict=True)]
            for own in self._samples
        ]
        self._inner_steps += 1
        for event in events:
            if self._inner_steps <= self.sync_every:
                check_islands(self._replicas, self._outer.global_params, self.placement)
            weights = [] if event.kind == "receive" else self._take_weights(event.fragment)
            self._outer.sync(event, self._replicas, weights, self._comm)
        if now < self.sync_every:
            return False
        weights = self._take_weights(-1)
        for replica in self._replicas:  # Ranks of an island have seen different samples.
            self.placement.average_on_island(replica.buffers)
        self._outer.average_buffers(self._replicas, weights, self._comm)
        return True

    def load_global(self) -> None:
        """Set all replicas to the global parameters, from which syncs may leave them diverged: what
        was trained is the global parameters. Call it on all ranks, after a step that returned True,
        when you need them in a model. Training may continue, without what replicas had not sent.
        """
        require(
            self._inner_steps % self.sync_every == 0,
            "a round is in progress; load global parameters after a step that returned True",
        )
        self._require_same_parameters()
        self._outer.copy_all_to_workers(self._replicas)

    def state_dict(self) -> dict[str, Any]:
        """The state of the outer step, and of replicas that differ from the global parameters:
        within a round, or if syncs leave them diverged. Save inner optimizers yourself, and of
        models what is frozen.

        Call it on all ranks, after the same step; each saves its own. Its tensors change as
        training continues; `copy.deepcopy` keeps them.
        """
        # A saved state cannot contain a mean in flight, so the outer step is taken now. The workers
        # still get its result when the schedule says so.
        self._outer.step()
        for model in self.models:
            free_gathered(model)
        # As the first rank's, if fewer ranks serve the worker when it is loaded; the same ones take
        # their own, because a sum in another order would have other bits.
        seen = [[*self.placement.sum_on_island(own)] for own in self._samples]
        within = self._inner_steps % self.sync_every > 0
        apart = within or self._syncing.diverges(self.num_workers)
        return {
            "outer": self._outer.state_dict(),
            "workers": self._here,
            "rank": self._rank,
            "shards": [shard_of(each) for each in self._outer.global_params],
            "apart": apart,
            "replicas": [_kept(model, apart) for model in self.models],
            "residuals": [replica.residuals for replica in self._replicas],
            "ranks": self.placement.ranks_per_worker,
            "samples": self._samples,
            "of_fewer": [own if self._rank == 0 else [0.0] * len(own) for own in seen],
            "counted": self._counted,
            "inner_steps": self._inner_steps,
            "schedule": self._schedule,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with the replicas as they were. Call it on all ranks, each
        with its own; where replicas do not differ and are not sharded, all may take that of one
        rank.

        Raises:
            ValueError: It is not a DiLoCo's of this version, is that of other workers or shards or
                of another model, was saved with other error feedback or other fragments, within a
                round of another schedule, or after another step than those of other ranks, or is
                not complete; or a model has other trainable parameters than at the start.
        """
        self._require_same_parameters()
        require(
            "of_fewer" in state,
            "the state is not a DiLoCo's, or was saved by an older version; load what "
            "state_dict() of this version gave",
        )
        steps = self.placement.all_values(state["inner_steps"])
        require(
            len({*steps}) == 1,
            f"the ranks' states were saved after inner steps {steps}; load on each rank one that "
            "was saved after the same step as those of the others",
        )
        parts = zip(state["shards"], map(shard_of, self._outer.global_params), strict=False)
        require(
            not self.placement.any(any(saved not in ("all", mine) for saved, mine in parts)),
            "a state has other shards than its rank has here; let each rank save its own state and "
            "load it, on as many ranks",
        )
        apart = state["apart"]
        own = (state["workers"], state["rank"]) == (self._here, self._rank)
        sync_every, streaming = state["schedule"]
        rounds, within = divmod(state["inner_steps"], sync_every)
        require(
            not within or state["schedule"] == self._schedule,
            f"the state was saved within a round, with sync_every {sync_every} and {streaming}, "
            "whose syncs come after other steps; give the same, or save after a step that returned "
            "True",
        )
        require(
            own or not (apart or any(state["residuals"])),
            f"the state is that of another rank, of workers {state['workers']}, and here are "
            f"{self._here}, which differ from them; let each rank save its own state and load it",
        )
        kept = [_kept(model, apart) for model in self.models]
        require(
            not own or _shapes(state["replicas"]) == _shapes(kept),
            "the state is that of a model with other parameters or buffers; load it with the model "
            "that it was saved with",
        )
        fits = len(state["samples"]) == len(self._samples)
        require(
            fits or not (apart and state["counted"]),
            "the state counts samples by fragment, and had other fragments when it was saved; give "
            "the same streaming",
        )
        self._outer.load_state_dict(state["outer"])  # It may refuse: then all stays as it was.
        self._outer.discard_in_flight()
        if not apart:
            self._outer.copy_all_to_workers(self._replicas)
        if own:
            for index, targets in enumerate(kept):
                copy_all(state["replicas"][index], targets)
                copy_all(state["residuals"][index], self._replicas[index].residuals)
        # Where replicas do not differ, nothing was trained since; other ranks may have more models.
        same = state["ranks"] == self.placement.ranks_per_worker
        self._samples = (
            list(state["samples" if same else "of_fewer"])
            if own and fits
            else [[0.0] * len(self.models) for _ in self._samples]
        )
        self._counted = state["counted"]
        self._inner_steps = rounds * self.sync_every + within  # Rounds may be longer now.

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have, with copies of the models."""
        require(
            self.placement.num_ranks == 1,
            "a DiLoCo over several ranks holds their connections, which cannot be copied or "
            "pickled; save its state_dict(), and load that into a new one",
        )
        self._outer.step()  # A mean in flight cannot be copied; see `state_dict`.
        return vars(self)

    def _require_same_parameters(self) -> None:
        """Refuse models that have other trainable parameters now than when this was made."""
        for worker, model, replica in zip(self._here, self.models, self._replicas, strict=True):
            free_gathered(model)
            now = trainable(model)
            require(
                len(now) == len(replica.params) and all(map(is_, now, replica.params)),
                f"the trainable parameters of worker {worker} are others than when DiLoCo was "
                "made, and would never be synced; make it again, between rounds, after parameters "
                "are frozen, unfrozen or replaced (as load_state_dict(assign=True) does)",
            )

    def _take_weights(self, which: int) -> list[float]:
        """The local models' shares of all samples in one list of `_samples`, which is reset."""
        counts, self._samples[which] = self._samples[which], [0.0] * len(self.models)
        if not self._counted:
            return [1 / self.num_workers] * len(self.models)
        counts = [*self.placement.sum_on_island(counts)]
        everyone = self.placement.gather(
            {worker: [count] for worker, count in zip(self._here, counts, strict=True)}
        )
        total = sum(count for (count,) in everyone.values())
        require(total > 0, "samples must not be 0 on every worker for all steps of a round")
        return [count / total for count in counts]


def _kept(model: nn.Module, apart: bool) -> list[Tensor]:
    """What a state keeps of a replica: all of it, or only buffers if parameters are alike: counts
    are its own, and `update_bn` may have set its statistics since the last sync.
    """
    kept: list[Tensor] = [*model.parameters()] if apart else []
    kept += [*state_buffers(model, floating=True), *state_buffers(model, floating=False)]
    return [tensor.detach() for tensor in kept]  # Without gradients, which copies would have, too.


def _shapes(replicas: Sequence[Sequence[Tensor]]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in replica] for replica in replicas]
