"""Carrying out a merge (AdLoCo section 3.2, arXiv 2508.18182; docs/method.md).

In a merge some trainers become one: the survivor continues, and the others are absorbed. Each thing
that trainers own has a fate: parameters, outer momentum, inner optimizer state, data streams and
the requested batch. If the wire format is lossy, means of parameters and of momentum cross in few
bits (`Syncing.parameter_wire`, `Syncing.difference_wire`).
"""

from collections.abc import Mapping, Sequence

import torch

from adloco.algorithms.model_state import copy_all, optimizer_tensors
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.placement.placement import Placement
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.merge import Merge, MergeFates, assign_workers


def apply_merge(
    merge: Merge,
    trainers: Mapping[int, Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> dict[int, Trainer]:
    """Carry out a merge, and return the living trainers by id.

    The workers of absorbed trainers are given to living ones, and start from their parameters.
    Called on all ranks.

    Args:
        merge: Which trainers merge, and with which weights.
        trainers: All living trainers, by id.
        workers: The workers in this process, of all trainers. Their parameters are those of their
            trainers.
        fates: What happens to the things that trainers own.
        placement: Where all workers live.
    """
    members = [trainers[trainer] for trainer in sorted(merge.weights)]
    survivor = trainers[merge.survivor]
    _merge_parameters(merge, members, survivor, fates, placement)
    _merge_momentum(merge, members, survivor, fates, placement)
    _merge_inner_state(merge, members, workers, fates, placement)
    _merge_requests(merge, members, survivor, fates)
    living = {trainer: trainers[trainer] for trainer in trainers if trainer not in merge.absorbed}
    _reassign(
        survivor,
        [trainers[trainer] for trainer in merge.absorbed],
        living,
        workers,
        fates,
        placement,
    )
    if fates.streams == "balance":
        _balance_streams(living, workers, placement)
    return living


def _merge_parameters(
    merge: Merge,
    members: Sequence[Trainer],
    survivor: Trainer,
    fates: MergeFates,
    placement: Placement,
) -> None:
    if fates.parameters == "survivor":
        return
    weights = (
        merge.weights
        if fates.parameters == "weighted"
        else dict.fromkeys(merge.weights, 1 / len(members))
    )
    wire = survivor.outer.syncing.parameter_wire
    params = {member.id: member.outer.global_params for member in members}
    buffers = {member.id: member.outer.buffers for member in members}
    _average(members, survivor, params, weights, placement, wire)
    _average(members, survivor, buffers, weights, placement)


def _merge_momentum(
    merge: Merge,
    members: Sequence[Trainer],
    survivor: Trainer,
    fates: MergeFates,
    placement: Placement,
) -> None:
    if survivor.outer.optimizer is None or fates.outer_momentum == "survivor":
        return
    if fates.outer_momentum == "reset":
        survivor.outer.optimizer.state.clear()
        return
    _fill_missing_momentum(members, placement)
    entries = {member.id: member.outer.momentum() for member in members}
    # Other state (Adam's) has second moments, by whose roots is divided: a loss could make them 0.
    names = {name for state in survivor.outer.optimizer.state.values() for name in state}
    wire = survivor.outer.syncing.difference_wire if names == {"momentum_buffer"} else None
    _average(members, survivor, entries, merge.weights, placement, wire)


def _fill_missing_momentum(members: Sequence[Trainer], placement: Placement) -> None:
    """Make sure that every trainer has outer optimizer state in this process.

    A trainer without workers here has never stepped here, so its optimizer has no state tensors. It
    gets a copy of the state of a trainer that has, which the caller overwrites.
    """
    here = next((member for member in members if placement.local(member.worker_ids)), None)
    for member in members:
        if here is not None and not member.outer.momentum():
            member.outer.copy_optimizer_state(here.outer)


@torch.no_grad()
def _average(
    members: Sequence[Trainer],
    survivor: Trainer,
    entries: Mapping[int, Sequence[torch.Tensor]],
    weights: Mapping[int, float],
    placement: Placement,
    wire: WireFormat | None = None,
) -> None:
    """Set the survivor's tensors to the weighted mean of each trainer's.

    It is computed as a mean over all workers of the merged trainers, so that every process that
    hosts one of them gets the same bits. Other processes do nothing.

    Args:
        members: The merged trainers.
        survivor: The one that continues.
        entries: Tensors of each trainer, by id.
        weights: Weight of each trainer, by id; they add up to 1.
        placement: Where all workers live.
        wire: The wire format; None: uncompressed.
    """
    homes = _homes(members)
    here = [homes[worker] for worker in placement.local(list(homes))]
    means = placement.comm(list(homes)).mean(
        [entries[home.id] for home in here],
        [weights[home.id] / len(home.worker_ids) for home in here],
        wire,
    )
    if here:
        copy_all(means, entries[survivor.id])


def _homes(members: Sequence[Trainer]) -> dict[int, Trainer]:
    """The trainer of each worker, in the order of the workers, which is that of sums."""
    homes = {worker: member for member in members for worker in member.worker_ids}
    return {worker: homes[worker] for worker in sorted(homes)}


def _merge_inner_state(
    merge: Merge,
    members: Sequence[Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> None:
    if fates.inner_state == "keep":
        return
    homes = _homes(members)
    local = {worker: homes[worker] for worker in placement.local(list(homes))}
    if fates.inner_state == "reset":
        for worker in local:
            for optimizer in workers[worker].optimizers:
                optimizer.state.clear()
            for residual in workers[worker].replica.residuals:
                residual.zero_()
        return
    # Residuals that are kept in the parameters were averaged with these before the merge (what
    # rounding left of them stays with its worker).
    residuals = {
        worker: workers[worker].replica.residuals
        if member.outer.syncing.residuals == "memory"
        else []
        for worker, member in local.items()
    }
    states = [
        [
            *(
                tensor
                for optimizer in workers[worker].optimizers
                for tensor in optimizer_tensors(optimizer)
            ),
            *residuals[worker],
        ]
        for worker in local
    ]
    weights = [merge.weights[member.id] / len(member.worker_ids) for member in local.values()]
    means = placement.comm(list(homes)).mean(states, weights)
    for state in states:
        copy_all(means, state)


def _merge_requests(
    merge: Merge, members: Sequence[Trainer], survivor: Trainer, fates: MergeFates
) -> None:
    wanted = {
        "survivor": survivor.requested_batch,
        "weighted": round(
            sum(merge.weights[member.id] * member.requested_batch for member in members)
        ),
        "sum": sum(member.requested_batch for member in members),
    }[fates.requested_batch]
    survivor.controller.requested_batch = min(wanted, survivor.controller.guards.maximum)
    if fates.parameters != "survivor":
        controllers = {member.id: member.controller for member in members}
        survivor.controller.merge(controllers, merge.weights)


def _reassign(
    survivor: Trainer,
    absorbed: Sequence[Trainer],
    living: Mapping[int, Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> None:
    """Give the freed workers to living trainers; each gets its new trainer's global parameters."""
    freed = sorted(worker for trainer in absorbed for worker in trainer.worker_ids)
    requests = {trainer.id: trainer.requested_batch for trainer in living.values()}
    counts = {trainer.id: len(trainer.worker_ids) for trainer in living.values()}
    homes = assign_workers(requests, counts, len(freed))
    for trainer in living.values():
        newcomers = [
            worker for worker, home in zip(freed, homes, strict=True) if home == trainer.id
        ]
        source = trainer.worker_ids[0]
        if newcomers and (trainer is not survivor or fates.outer_momentum == "survivor"):
            _fill_missing_momentum([*absorbed, trainer], placement)
        trainer.worker_ids = sorted([*trainer.worker_ids, *newcomers])
        # All workers of the merged trainers have taken part in the means, so they have the result.
        missing = (
            _not_averaged(survivor, fates)
            if trainer is survivor
            else [*trainer.outer.parameters(), *trainer.outer.momentum()]
        )
        copy_all(placement.comm(trainer.worker_ids).broadcast(missing, source, newcomers), missing)
        trainer.outer.broadcast_all(
            [workers[worker].replica for worker in placement.local(trainer.worker_ids)]
        )


def _not_averaged(survivor: Trainer, fates: MergeFates) -> list[torch.Tensor]:
    """The survivor's tensors that the merge has not averaged."""
    parameters = survivor.outer.parameters() if fates.parameters == "survivor" else []
    return [*parameters, *(survivor.outer.momentum() if fates.outer_momentum == "survivor" else [])]


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
