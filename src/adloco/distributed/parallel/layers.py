"""The layers of a model: what is gathered, sharded, filled or synced at once."""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from adloco.distributed.dtensor import is_sharded, ranks_of
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.errors import require

Fill = Callable[[nn.Module, nn.Module], None]
"""(model, part) -> None: gives memory and values to a part of a model built on the meta device.

The memory is on the CPU, and the values are the same on every rank. It is called for each of
`blocks(model)`, and then with the model itself as the part, to fill what is left.
"""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the members of its outermost ModuleLists.

    A block that shares weights with a module outside it is not listed. It belongs to the rest,
    which is gathered for the whole pass.
    """
    uses = _uses(model)
    return [
        block
        for block in _members(model)
        if all(count == uses[parameter] for parameter, count in _uses(block).items())
    ]


def layers(model: nn.Module) -> list[list[int]]:
    """The layers of a model, each as indices into `trainable(model)`.

    A layer is a repeated block, or any other module that has parameters itself. A tied parameter
    belongs to the first layer that uses it.
    """
    indices = {parameter: index for index, parameter in enumerate(trainable(model))}
    inside = {module: block for block in blocks(model) for module in block.modules()}
    found: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in indices:
                found.setdefault(inside.get(module, module), []).append(indices.pop(parameter))
    return list(found.values())


def fill_whole(model: nn.Module, fill: Fill) -> None:
    """Fill a model that is not sharded."""
    for part in (*blocks(model), model):
        fill(model, part)


def written_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those outside of the model's state too, and in the place of a
    quantised one its parts; not buffers that are sparse or repeat a value in memory (`expand`), in
    which nothing can be written.
    """
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.layout == torch.strided and not repeats(buffer)
    }
    named = dict(model.named_parameters()) | buffers
    return {part: own for name, each in named.items() for part, own in plain_parts(name, each)}


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), or those of the tensors that it is made of, such as the integers and the
    scales of a quantised weight, by torch's protocol for such tensors.
    """
    flatten = None if is_sharded(tensor) else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from plain_parts(f"{name}.{part}", getattr(tensor, part))


def repeats(tensor: Tensor) -> bool:
    """True if a tensor repeats a value in memory, as `expand` makes it."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not step for size, step in sizes)


def ranks_of_wrappers(model: nn.Module) -> dict[str, set[int]]:
    """The ranks that share the model's gradients at every step, by what shares them; of FSDP with
    HYBRID_SHARD those that this rank talks to.
    """
    ranks = {"shards": set[int]().union(*map(ranks_of, model.parameters()))}
    for part in model.modules():  # A compiled model holds the wrapper.
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
            groups = [part.process_group, getattr(part, "_inter_node_pg", None)]
            found = [dist.get_process_group_ranks(group) for group in groups if group]
            ranks[type(part).__name__] = set[int]().union(*found)
    return ranks


def ranks_of_statistics(model: nn.Module) -> set[int]:
    """The ranks over which SyncBatchNorm takes statistics at every step; without a group all."""
    parts = [part for part in model.modules() if isinstance(part, nn.SyncBatchNorm)]
    groups = [part.process_group or dist.group.WORLD for part in parts]
    return set[int]().union(*map(dist.get_process_group_ranks, groups))


def require_bare(model: nn.Module) -> None:
    """Raise ValueError if ranks share the model's gradients already: an engine would average them
    again.
    """
    for wrapper, ranks in ranks_of_wrappers(model).items():
        require(
            len(ranks) < 2,
            f"a model is in {wrapper} over {len(ranks)} ranks; leave that out, and give place() "
            "the worker's replica_size or shard_size, which does the same",
        )


def free_gathered(model: nn.Module) -> None:
    """Put the shards back in the place of parameters that FSDP2 has kept gathered since a forward
    pass without a backward pass. They may be of a shorter type, and would be used again after the
    shards have changed.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def in_flat_shards(model: nn.Module) -> bool:
    """True if FSDP1 has cut the model's parameters into pieces, which are tensors like others."""
    return any(
        isinstance(part, FullyShardedDataParallel)
        and part.sharding_strategy != ShardingStrategy.NO_SHARD
        for part in model.modules()
    )


def _members(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        is_member = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        found += [child] if is_member else _members(child)
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Number of names of each parameter."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
