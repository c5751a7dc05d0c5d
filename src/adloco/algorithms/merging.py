"""Carrying out a merge (AdLoCo section 3.2, arXiv 2508.18182; docs/method.md).

In a merge some trainers become one: the survivor continues, and the others are absorbed. Each thing
that trainers own has a fate: parameters, outer momentum, inner optimizer state, data streams and
the requested batch. The gradient statistics that are known have none: unless the survivor keeps its
own parameters, it gets the mean of their logarithms, weighted by requested batch (`rules.level`).
If the wire format is lossy, means of parameters and of momentum cross in few bits
(`Syncing.parameter_wire`, `Syncing.momentum_wire`).
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from adloco.algorithms.model_state import copy_all
from adloco.algorithms.optimizer_state import (
    complete_state,
    load_optimizer,
    optimizer_tensors,
    state_sizes,
)
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.messages import broadcast_state
from adloco.distributed.placement.placement import Placement
from adloco.distributed.plain_state import join_state, split_state
from adloco.distributed.wire.wire_format import WireFormat
from adloco.errors import require
from adloco.rules.merge import Merge, MergeFates, assign_workers


def apply_merge(
    merge: Merge,
    trainers: Mapping[int, Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> dict[int, Trainer]:
    """Carry out a merge, and return the living trainers by id.

    The workers of absorbed trainers are given to living ones. Those of the survivor, and of
    trainers that get any, start from the global parameters. Called on all ranks.

    workers: The workers in this process, of all trainers.
    """
    applied = _AppliedFates(merge, trainers, workers, fates, placement)
    applied.parameters()
    applied.outer_momentum()
    applied.inner_state()
    applied.requests()
    applied.gradient_statistics()
    living = {trainer: trainers[trainer] for trainer in trainers if trainer not in merge.absorbed}
    applied.reassign(living)
    if fates.streams == "balance":
        _balance_streams(living, workers, placement)
    return living


class _AppliedFates:
    """The fates of what the trainers of a merge own, a method each."""

    def __init__(
        self,
        merge: Merge,
        trainers: Mapping[int, Trainer],
        workers: Mapping[int, Worker],
        fates: MergeFates,
        placement: Placement,
    ) -> None:
        """The arguments are those of `apply_merge`."""
        self._members = [trainers[trainer] for trainer in sorted(merge.weights)]
        self._survivor = trainers[merge.survivor]
        self._absorbed = [trainers[trainer] for trainer in merge.absorbed]
        self._weights = merge.weights
        self._workers = workers
        self._fates = fates
        self._placement = placement
        homes = {worker: member for member in self._members for worker in member.worker_ids}
        # In the order of the workers, which is that of sums.
        self._homes = {worker: homes[worker] for worker in sorted(homes)}
        self._here = {worker: self._homes[worker] for worker in placement.local(list(self._homes))}
        """The trainer of each worker of the merge, and of each one in this process."""

    def parameters(self) -> None:
        members, weights = self._members, self._weights
        if self._fates.parameters == "survivor":
            return
        if self._fates.parameters == "uniform":
            weights = dict.fromkeys(weights, 1 / len(members))
        wire = self._survivor.outer.syncing.parameter_wire
        self._average({each.id: each.outer.global_params for each in members}, weights, wire)
        # As in `OuterSync.average_buffers`.
        exact = [[buffer.double() for buffer in home.outer.buffers] for home in self._here.values()]
        means = self._mean(exact, weights)
        if self._here:
            copy_all(means, self._survivor.outer.buffers)

    def outer_momentum(self) -> None:
        outer, fate = self._survivor.outer, self._fates.outer_momentum
        if outer.optimizer is None or fate == "survivor":
            return
        if fate == "reset":
            outer.reset_optimizer()
            return
        _fill_missing_momentum(self._members, self._placement)
        entries = {member.id: member.outer.momentum() for member in self._members}
        # Other state (Adam's) has second moments, by whose roots is divided: a loss could make them
        # 0.
        names = {name for state in outer.optimizer.state.values() for name in state}
        wire = outer.syncing.momentum_wire if names == {"momentum_buffer"} else None
        self._average(entries, self._weights, wire)

    def inner_state(self) -> None:
        workers = [self._workers[worker] for worker in self._here]
        if self._fates.inner_state == "reset":
            for worker in workers:
                worker.forget()
        if self._fates.inner_state in ("keep", "reset"):
            return
        for worker in workers:
            for optimizer in worker.optimizers:
                complete_state(optimizer)
        self._require_same_states()
        states = [
            [tensor for optimizer in worker.optimizers for tensor in optimizer_tensors(optimizer)]
            for worker in workers
        ]
        means = self._mean(states, self._weights)
        for state in states:
            copy_all(means, state)

    def _require_same_states(self) -> None:
        """Raise ValueError on all ranks if workers' inner optimizers have states of other sizes.

        Alone, the ranks that see it would leave the others waiting in the sum.
        """
        sizes = self._placement.gather(
            {
                worker.id: [size for each in worker.optimizers for size in state_sizes(each)]
                for worker in self._workers.values()
            }
        )
        first, *others = self._homes
        unlike = next((other for other in others if sizes[other] != sizes[first]), None)
        require(
            unlike is None,
            f"the inner optimizers of workers {first} and {unlike} have no mean, because they have "
            "not taken steps with the same parameters; set merge.inner_state keep or reset",
        )

    def requests(self) -> None:
        survivor, members = self._survivor, self._members
        requests = {member.id: member.requested_batch for member in members}
        wanted = {
            "survivor": survivor.requested_batch,
            "weighted": round(sum(self._weights[each] * requests[each] for each in requests)),
            "sum": sum(requests.values()),
        }[self._fates.requested_batch]
        survivor.controller.requested_batch = min(wanted, survivor.controller.guards.maximum)

    def gradient_statistics(self) -> None:
        """Average what the trainers know of S and |G|^2; not if parameters are the survivor's."""
        if self._fates.parameters != "survivor":
            controllers = {member.id: member.controller for member in self._members}
            self._survivor.controller.merge(controllers, self._weights)

    def reassign(self, living: Mapping[int, Trainer]) -> None:
        """Give the freed workers to living trainers, whose global parameters they get."""
        placement, momentum = self._placement, self._fates.outer_momentum
        freed = sorted(worker for trainer in self._absorbed for worker in trainer.worker_ids)
        requests = {trainer.id: trainer.requested_batch for trainer in living.values()}
        counts = {trainer.id: len(trainer.worker_ids) for trainer in living.values()}
        homes = assign_workers(requests, counts, len(freed))
        for trainer in living.values():
            newcomers = [
                worker for worker, home in zip(freed, homes, strict=True) if home == trainer.id
            ]
            # All workers of the merged trainers have taken part in means, so they have the results.
            whole = trainer is not self._survivor
            missing = whole or momentum == "survivor"
            if newcomers and missing:
                _fill_missing_momentum([*self._absorbed, trainer], placement)
            tensors: list[Tensor] = []
            if whole or self._fates.parameters == "survivor":
                tensors += trainer.outer.parameters()
            if missing:
                tensors += trainer.outer.momentum()
            source = trainer.worker_ids[0]
            trainer.worker_ids = sorted([*trainer.worker_ids, *newcomers])
            comm = placement.comm(trainer.worker_ids)
            copy_all(comm.broadcast(tensors, source, newcomers), tensors)
            if newcomers:
                _share_numbers(trainer, source, placement)
            if newcomers or trainer is self._survivor:
                here = placement.local(trainer.worker_ids)
                replicas = [self._workers[worker].replica for worker in here]
                trainer.outer.copy_all_to_workers(replicas)

    def _average(
        self,
        entries: Mapping[int, Sequence[Tensor]],
        weights: Mapping[int, float],
        wire: WireFormat | None,
    ) -> None:
        """Set the survivor's tensors to the weighted mean of each trainer's, by its id, which cross
        in this wire format; None: uncompressed.
        """
        means = self._mean([entries[home.id] for home in self._here.values()], weights, wire)
        if self._here:
            copy_all(means, entries[self._survivor.id])

    @torch.no_grad()
    def _mean(
        self,
        per_worker: Sequence[Sequence[Tensor]],
        weights: Mapping[int, float],
        wire: WireFormat | None = None,
    ) -> list[Tensor]:
        """The mean over all workers of the merged trainers, so that every process that hosts one of
        them gets the same bits. Other processes get nothing.

        Raises:
            ValueError: Some are whole numbers or bools, but for a count.
        """
        require(
            all(
                each.is_floating_point() or each.is_complex() or each.numel() == 1
                for each in chain(*per_worker)
            ),
            "an optimizer has whole numbers in its state, as those of 8 bits have, whose mean says "
            "nothing; set merge.inner_state keep or reset, merge.outer_momentum survivor or reset",
        )
        shares = [weights[home.id] / len(home.worker_ids) for home in self._here.values()]
        return self._placement.comm(list(self._homes)).mean(per_worker, shares, wire)


def _fill_missing_momentum(members: Sequence[Trainer], placement: Placement) -> None:
    """Make sure that every trainer has outer optimizer state in this process.

    A trainer without workers here has never stepped here, so its optimizer has no state. It gets a
    copy of the state of a trainer that has, which the caller overwrites.
    """
    local = {member.id for member in members if placement.local(member.worker_ids)}
    here = next((member.outer.optimizer for member in members if member.id in local), None)
    for member in members:
        own = member.outer.optimizer
        if here and own and member.id not in local and not member.outer.momentum():
            load_optimizer(own, here.state_dict())


def _share_numbers(trainer: Trainer, source: int, placement: Placement) -> None:
    """Set what the outer optimizer has besides the tensors of its state, such as a rate that it
    adapts, to what it has where worker `source` lives. Called on all ranks.
    """
    optimizer = trainer.outer.optimizer
    if optimizer is None or placement.num_ranks == 1:
        return
    saved = optimizer.state_dict()
    state, tensors = split_state(saved["state"])
    own = {"state": state, "param_groups": saved["param_groups"]}
    numbers = broadcast_state(own, placement.owner(source) * placement.ranks_per_worker)
    plain, in_groups = split_state(numbers)
    others = in_groups or plain != split_state(own)[0]
    if others and placement.local(trainer.worker_ids):
        state = join_state(numbers["state"], tensors)
        load_optimizer(optimizer, {**numbers, "state": state})


def _balance_streams(
    living: Mapping[int, Trainer], workers: Mapping[int, Worker], placement: Placement
) -> None:
    by_demand = sorted(
        living.values(),
        key=lambda trainer: (-trainer.requested_batch / len(trainer.worker_ids), trainer.id),
    )
    readers = [worker for trainer in by_demand for worker in trainer.worker_ids]
    read = placement.gather(
        {worker.id: [worker.position, worker.stream] for worker in workers.values()}
    )
    for reader, (position, stream) in zip(readers, sorted(read.values()), strict=True):
        if reader in workers:
            workers[reader].stream, workers[reader].position = int(stream), int(position)
