"""Carrying out a merge: the fate of parameters, outer momentum, inner optimizer state, streams and
batch (AdLoCo section 3.2; DESIGN section 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from adloco.algorithms.model_state import copy_all, optimizer_tensors
from adloco.algorithms.trainer import Trainer
from adloco.algorithms.worker import Worker
from adloco.distributed.comm.buckets import PerWorker
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.rules.merge import Merge, MergePolicy, assign_workers
from adloco.rules.merge_policies.no_merge import NoMerge

FATES = {
    "parameters": ("weighted", "uniform", "survivor"),
    "outer_momentum": ("weighted", "survivor", "reset"),
    "inner_state": ("keep", "mean", "reset"),
    "streams": ("keep", "balance"),
    "requested_batch": ("survivor", "weighted", "sum"),
}


@dataclass(frozen=True, kw_only=True)
class MergeFates:
    """What becomes of each thing that trainers own when they merge."""

    parameters: Literal["weighted", "uniform", "survivor"] = "weighted"
    """weighted: mean of the merged trainers' parameters by requested batch; uniform: plain mean;
    survivor: the others' are dropped.
    """
    outer_momentum: Literal["weighted", "survivor", "reset"] = "weighted"
    """weighted: mean by requested batch; survivor: the survivor's own; reset: as at the start."""
    inner_state: Literal["keep", "mean", "reset"] = "keep"
    """Inner optimizer state and residuals of the merged trainers' workers. keep: each its own;
    mean: by requested batch; reset: as at the start."""
    streams: Literal["keep", "balance"] = "keep"
    """keep: a worker takes its stream along; balance: the least-read streams go to the trainers
    with the largest requests.
    """
    requested_batch: Literal["survivor", "weighted", "sum"] = "survivor"
    """survivor: the survivor's; weighted: mean by requested batch; sum. Never above batch.maximum.
    """

    def __post_init__(self) -> None:
        for name, allowed in FATES.items():
            require(
                getattr(self, name) in allowed,
                f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, "
                f"got {getattr(self, name)!r}",
            )


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Which trainers merge, and what becomes of what they own."""

    policy: MergePolicy = field(default_factory=NoMerge)
    """Which trainers merge, and when."""
    fates: MergeFates = field(default_factory=MergeFates)
    """What becomes of parameters, momentum, inner state, streams and requests."""


def apply_merge(
    merge: Merge,
    trainers: Mapping[int, Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> dict[int, Trainer]:
    """The living trainers after the merge; workers of absorbed ones serve others, and have their
    parameters.

    Args:
        workers: Those of all trainers that live in this process, with their trainers' global
            parameters.
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
    entries = {member.id: member.outer.parameters() for member in members}
    _copy_if_taken_part(
        _mean_over_trainers(members, entries, weights, placement), entries[survivor.id]
    )


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
    _share_momentum_shape(members, placement)
    entries = {member.id: member.outer.momentum() for member in members}
    _copy_if_taken_part(
        _mean_over_trainers(members, entries, merge.weights, placement), entries[survivor.id]
    )


def _share_momentum_shape(members: Sequence[Trainer], placement: Placement) -> None:
    """Where a trainer has never stepped, because its workers lived elsewhere, give it the state of
    one that has, to be overwritten.
    """
    here = next((member for member in members if placement.local(member.worker_ids)), None)
    for member in members:
        if here is not None and not member.outer.momentum():
            member.outer.copy_optimizer_state(here.outer)


def _copy_if_taken_part(means: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    # A process that hosts none of the merged trainers' workers gets no means.
    if means:
        copy_all(means, targets)


def _mean_over_trainers(
    members: Sequence[Trainer],
    entries: Mapping[int, Sequence[torch.Tensor]],
    weights: Mapping[int, float],
    placement: Placement,
) -> list[torch.Tensor]:
    """Mean over all workers of the merged trainers of what each one's trainer holds, so that every
    worker ends with the result.
    """
    per_worker: PerWorker = [
        entries[member.id] for member in members for _ in placement.local(member.worker_ids)
    ]
    per_worker_weights = [
        weights[member.id] / len(member.worker_ids)
        for member in members
        for _ in placement.local(member.worker_ids)
    ]
    return placement.comm([worker for member in members for worker in member.worker_ids]).mean(
        per_worker, per_worker_weights
    )


def _merge_inner_state(
    merge: Merge,
    members: Sequence[Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> None:
    if fates.inner_state == "keep":
        return
    local = {worker: member for member in members for worker in placement.local(member.worker_ids)}
    if fates.inner_state == "reset":
        for worker in local:
            for optimizer in workers[worker].optimizers:
                optimizer.state.clear()
            for residual in workers[worker].replica.residuals:
                residual.zero_()
        return
    # Residuals in the parameters were averaged with them before the merge.
    unsent = {
        worker: [] if member.outer.syncing.residual_in_params else workers[worker].replica.residuals
        for worker, member in local.items()
    }
    states = [
        [
            *(
                tensor
                for optimizer in workers[worker].optimizers
                for tensor in optimizer_tensors(optimizer)
            ),
            *unsent[worker],
        ]
        for worker in local
    ]
    weights = [merge.weights[member.id] / len(member.worker_ids) for member in local.values()]
    means = placement.comm([worker for member in members for worker in member.worker_ids]).mean(
        states, weights
    )
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


def _reassign(
    survivor: Trainer,
    absorbed: Sequence[Trainer],
    living: Mapping[int, Trainer],
    workers: Mapping[int, Worker],
    fates: MergeFates,
    placement: Placement,
) -> None:
    """Send the freed workers where the demand is; each ends at its trainer's global parameters."""
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
            _share_momentum_shape([*absorbed, trainer], placement)
        trainer.worker_ids = sorted([*trainer.worker_ids, *newcomers])
        # All workers of merged trainers took part in the means, and hold these already.
        lacking = (
            _not_averaged(survivor, fates)
            if trainer is survivor
            else [*trainer.outer.parameters(), *trainer.outer.momentum()]
        )
        copy_all(placement.comm(trainer.worker_ids).broadcast(lacking, source, newcomers), lacking)
        trainer.outer.broadcast_all(
            [workers[worker].replica for worker in placement.local(trainer.worker_ids)]
        )


def _not_averaged(survivor: Trainer, fates: MergeFates) -> list[torch.Tensor]:
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
