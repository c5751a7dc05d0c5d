"""The one module that knows DTensor: it turns sharded tensors into shards or whole ones, and back.

Elementwise work (outer step, pseudo-gradients, merges) acts on sharded tensors as on others.
Reductions between islands act on this rank's shards.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from adloco.errors import require

Device = torch.device | str | None


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, in the same memory; any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def is_sharded(tensor: Tensor) -> bool:
    """True if the ranks of an island have different parts of the tensor."""
    return isinstance(tensor, DTensor)


def ranks_of(tensor: Tensor) -> set[int]:
    """The ranks that have a part or a copy of a sharded tensor; none for any other."""
    return {*tensor.device_mesh.mesh.flatten().tolist()} if isinstance(tensor, DTensor) else set()


def shard_of(tensor: Tensor) -> str:
    """This rank's part of a tensor in words: its shard over each dimension of a mesh, or all."""
    if not isinstance(tensor, DTensor):
        return "all"
    mesh = tensor.device_mesh
    shards = [
        f"shard {mesh.get_local_rank(dimension)} of {mesh.size(dimension)}"
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return " of ".join(shards) or "all"


def first_element(tensor: Tensor) -> int:
    """Index of the first element of this rank's shard in the whole tensor, both flattened.

    0 if the shard is not one range of rows (columns, shards of shards).
    """
    if not isinstance(tensor, DTensor):
        return 0
    if [each for each in tensor.placements if not each.is_replicate()] != [Shard(0)]:
        return 0
    rank = tensor.device_mesh.get_local_rank(_sharded_dimension(tensor))
    return sum(rows_of_shards(tensor)[:rank]) * math.prod(tensor.shape[1:])


def rows_of_shards(tensor: Tensor) -> list[int]:
    """Number of rows (entries of the first dimension) that each shard of a tensor has."""
    if not isinstance(tensor, DTensor):
        return [len(tensor)]
    shards = tensor.device_mesh.size(_sharded_dimension(tensor))
    most = -(-len(tensor) // shards)
    return [max(0, min(most, len(tensor) - most * shard)) for shard in range(shards)]


def shard_group(tensor: Tensor) -> ProcessGroup | None:
    """The ranks that together have the rows of a sharded tensor; None if this one has all."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh.get_group(_sharded_dimension(tensor))


def _sharded_dimension(tensor: DTensor) -> int:
    """The dimension of a tensor's mesh over which its rows are spread."""
    spread = [
        dimension
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    require(
        len(spread) == 1 and tensor.placements[spread[0]].is_shard(0),
        "Muon needs matrices that are whole or sharded by rows, as fully_shard does it, and one is "
        f"placed as {tensor.placements}; train such matrices with AdamW",
    )
    return spread[0]


def with_local(shard: Tensor, like: Tensor) -> Tensor:
    """Make a tensor that is sharded like another from this rank's shard of it, which may be in host
    memory where the other is on a GPU.

    Returns the shard itself if the other tensor is not sharded.
    """
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        like.device_mesh if shard.device == local(like).device else _host_mesh(like.device_mesh),
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.no_grad()
def in_memory_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to the device or host memory of another one of its shape and shards.

    Returns the tensor unchanged if it is there already.
    """
    return with_local(local(tensor).to(local(like).device), like=like)


def converted(
    tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> list[Tensor]:
    """Local tensors of one data type in another one, by one kernel, on a device (None: each on its
    own).
    """
    here = [tensor.to(device or tensor.device) for tensor in tensors]
    if not here or here[0].dtype == dtype:
        return here
    result = [torch.empty_like(tensor, dtype=dtype) for tensor in here]
    torch._foreach_copy_(result, here)
    return result


@torch.no_grad()
def zeros_like(tensor: Tensor, dtype: torch.dtype, *, device: Device = None) -> Tensor:
    """Zeros that are sharded like a tensor, on a device; None: the tensor's own."""
    return with_local(torch.zeros_like(local(tensor), dtype=dtype, device=device), tensor)


@torch.no_grad()
def copied(tensor: Tensor, *, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor, with its shards; row by row in memory, however the tensor lies in it.

    device, dtype: Those of the copy; None: the tensor's own.
    """
    shard = local(tensor).detach()
    copy = shard.to(device=device or shard.device, dtype=dtype or shard.dtype, copy=True)
    return with_local(copy.contiguous(), tensor)


@functools.cache
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks for tensors in host memory.

    A sharded tensor on a mesh of GPUs cannot be in host memory.
    """
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        "cpu",
        mesh=mesh.mesh if len(groups) > 1 else None,
        mesh_dim_names=mesh.mesh_dim_names,
    )


def scattered(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor like another one of its shape, without communication, and lay it out in
    memory like it: fused optimizers walk through memory.

    Every rank has the whole tensor and keeps its shard of it. What is sharded alike already may be
    of another run's mesh, which torch does not add to this one's.
    """
    if isinstance(tensor, DTensor):
        return in_memory_of(tensor, like) if isinstance(like, DTensor) else tensor
    if not isinstance(like, DTensor):
        if tensor.stride() == like.stride():
            return tensor
        return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return distribute_tensor(
        tensor.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def gather_shards(value: Any, *, keep: bool = True, copy: bool = True) -> Any:
    """Any nesting of dictionaries, lists and tuples in host memory, with whole tensors.

    Called on all ranks of an island, because each sharded tensor is gathered from them.

    Args:
        keep: False on ranks that need none of it: their tensors are empty.
        copy: False to leave what is whole and in host memory where it is.
    """
    if isinstance(value, Tensor):
        whole = value.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        return whole.to("cpu", copy=copy).contiguous() if keep else torch.empty(0, device="cpu")
    if isinstance(value, Mapping):
        return {key: gather_shards(item, keep=keep, copy=copy) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [gather_shards(item, keep=keep, copy=copy) for item in value]
        return tuple(items) if isinstance(value, tuple) else items  # Also of a named tuple.
    return value


CACHE_CLEARS = (
    "debug._clear_sharding_prop_cache",
    "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
    "_sharding_prop.ShardingPropagator._propagate_tensor_meta.cache_clear",
    "_redistribute._gen_transform_infos.cache_clear",
    "_redistribute.clear_redistribute_planner_cache",
    "_collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
)
"""Functions of torch.distributed.tensor that clear what it remembers of meshes. It has no public
ones, and each version has others.
"""


def forget_meshes() -> None:
    """Clear what torch and `_host_mesh` remember of sharded tensors: it holds their meshes, and so
    the connections and threads of process groups that were left.
    """
    _host_mesh.cache_clear()
    with suppress(ImportError):
        import torch.distributed.tensor.debug  # Half a second, which few runs need.
    for name in CACHE_CLEARS:
        with suppress(AttributeError):
            attrgetter(name)(torch.distributed.tensor)()
