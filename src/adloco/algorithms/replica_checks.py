"""Checks that the models of workers are what a sync takes them for: one model, of which each
worker, and in a worker each of its ranks, has a copy or a part.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from adloco.algorithms.model_state import Replica
from adloco.distributed.dtensor import is_sharded, local, shard_of
from adloco.distributed.parallel.layers import (
    in_flat_shards,
    ranks_of_statistics,
    ranks_of_wrappers,
    written_tensors,
)
from adloco.distributed.placement.placement import Placement
from adloco.errors import require

FIRST = 64
"""Values of each parameter by which ranks compare how it has moved."""
CODES = 8
"""Whole numbers of a quantised parameter by which models are compared."""
APART = 0.01
"""Relative distance above which ranks have trained apart; sums in no fixed order differ by less."""


def check_wrappers(models: Sequence[nn.Module], placement: Placement) -> None:
    """Refuse models whose gradients or statistics are averaged over several workers at every step,
    or whose shards look like whole tensors.
    """
    if placement.num_ranks == 1:
        return
    size = placement.ranks_per_worker
    first = placement.rank // size * size
    own = [*range(first, first + size)]
    for model in models:
        for wrapper, ranks in ranks_of_wrappers(model).items():
            require(
                ranks <= {*own},
                f"a model is in {wrapper} over {len(ranks)} ranks, which averages the gradients of "
                "several workers at every step; give the model without it, or with a group of one "
                f"worker's ranks (here {own}, not {sorted(ranks)})",
            )
        ranks = ranks_of_statistics(model)
        require(
            ranks <= {*own},
            f"a model has SyncBatchNorm over {len(ranks)} ranks, which exchanges statistics of "
            "several workers at every step; leave BatchNorm, or give it one worker's ranks (here "
            f"{own}) as its process_group",
        )
        require(
            not in_flat_shards(model),
            "a model is in FullyShardedDataParallel, whose shards cannot be told from whole "
            "tensors; shard it by torch.distributed.fsdp.fully_shard, or give it NO_SHARD",
        )


def check_alike(
    models: Mapping[int, nn.Module], settings: Mapping[str, str], placement: Placement
) -> None:
    """Refuse models or settings that differ between workers: copies would repeat tensors or mix
    them up, and syncs would meet those of other steps.

    models: Of the workers here, by id.
    """
    rank = f" on rank {placement.rank}" if placement.ranks_per_worker > 1 else ""
    mine = [
        (f"worker {worker}{rank}", {**settings, **_described(model)})
        for worker, model in models.items()
    ]
    everyone = [each for own in placement.all_values(mine) for each in own]
    first, expected = everyone[0]
    for worker, found in everyone:
        # In their order, in which parameters are copied and synced.
        for (name, one), (other_name, other) in zip_longest(
            expected.items(), found.items(), fillvalue=("nothing", "absent")
        ):
            require(
                (name, one) == (other_name, other),
                "models and settings must be the same for all workers, but where "
                f"{first} has {name}: {one}, {worker} has {other_name}: {other}",
            )


def check_same_shards(models: Sequence[nn.Module], placement: Placement) -> None:
    """Refuse ranks that have different shards although they exchange them or should be copies."""
    names = [name for name, _ in models[0].named_parameters()]
    parts = placement.all_values(
        [[shard_of(parameter) for parameter in model.parameters()] for model in models]
    )
    for rank, of_models in enumerate(parts):
        like = rank % placement.shards
        for found in of_models:
            for name, one, other in zip(names, parts[like][0], found, strict=True):
                require(
                    one == other,
                    f"ranks {like} and {rank} must have the same part of {name}, but have "
                    f"{one} and {other}; give place() the shard_size of your mesh, which has "
                    "the shards of a model on neighbouring ranks",
                )


def check_islands(
    replicas: Sequence[Replica], start: Sequence[Tensor], placement: Placement
) -> None:
    """Refuse a worker whose ranks have each trained on their own: a sync takes a part of the worker
    from each of them, as if they were copies.

    start: The global parameters, from which they have moved.
    """
    if placement.ranks_per_worker == 1:
        return
    apart = False
    for replica in replicas:
        for sharded in (False, True):
            moved = [
                _moved(parameter, begin)
                for parameter, begin in zip(replica.params, start, strict=True)
                if is_sharded(parameter) == sharded
            ]
            if moved:
                own = torch.cat(moved)
                mean = placement.mean_of_copies(own, sharded=sharded)
                apart |= bool((own - mean).norm() > APART * mean.norm())
    require(
        not placement.any(apart),
        "ranks that serve one worker have trained it each on its own, so their gradients must "
        "be averaged at every step; put the model into DistributedDataParallel, with the "
        "worker's ranks as its process_group, or give all of it to fully_shard, or place() "
        "one rank for each worker",
    )


def warn_if_alike(
    replicas: Sequence[Replica], start: Sequence[Tensor], placement: Placement
) -> None:
    """Warn if the workers of all islands have taken the same steps, to the bit, so that nothing is
    left to sync: a wrapper cannot be seen from the model inside it.

    start: The global parameters, from which they have moved.
    """
    size = placement.ranks_per_worker
    if placement.num_ranks == size:
        return
    moved = torch.cat(list(map(_moved, replicas[0].params, start)))
    digest = hashlib.sha256(repr(moved.tolist()).encode()).hexdigest() if moved.any() else ""
    digests = {*placement.all_values(digest)[::size]}
    if len(digests) == 1 and "" not in digests and placement.is_rank_zero:
        warnings.warn(
            "all workers have taken the same steps, so nothing is left to sync; give each its own "
            "data, and let no DistributedDataParallel over several workers be around the model "
            "(accelerate, the Hugging Face Trainer and Lightning wrap it by themselves)",
            stacklevel=3,
        )


def _described(model: nn.Module) -> dict[str, str]:
    """Facts about each tensor that all replicas have in common, by name, in order.

    A replica may be compiled where another one is not, for which torch adds to its names.
    """
    return {
        name.replace("_orig_mod.", ""): f"{tuple(tensor.shape)} of {tensor.dtype}, "
        + ("trainable" if tensor.requires_grad else "frozen")
        + _codes(tensor)
        for name, tensor in written_tensors(model).items()
    }


def _codes(tensor: Tensor) -> str:
    """Whole numbers in a parameter of a class of its own. Those of bitsandbytes keep their scales
    beside them, where no copy of the numbers takes them along, so they must be built alike.
    """
    if type(tensor) is nn.Parameter or not isinstance(tensor, nn.Parameter):
        return ""
    if tensor.is_floating_point() or tensor.is_meta or is_sharded(tensor):
        return ""
    return f", beginning with {tensor.detach().flatten()[:CODES].tolist()}"


def _moved(parameter: Tensor, begin: Tensor) -> Tensor:
    """How far a few of the values that this rank has of a parameter have moved, in float64."""
    now, before = (local(each).detach().reshape(-1)[:FIRST] for each in (parameter, begin))
    return now.double() - before.to(now.device).double()
