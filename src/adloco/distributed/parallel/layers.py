"""The parts of a model that are gathered, sharded, filled or synced one at a time: its repeated
blocks, and the rest.
"""

from collections import Counter
from collections.abc import Callable

from torch import nn

from adloco.distributed.parallel.gradient_norms import trainable

Fill = Callable[[nn.Module, nn.Module], None]
"""(model, part) -> None: gives memory on the CPU and values to a part of a model that was built on
the meta device, the same on every rank.

Called for each of `blocks(model)` and then for the whole, of which it fills what is left.
"""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the members of its outermost ModuleLists.

    A block that shares weights with anything outside it is left to the rest, which is gathered for
    the whole pass.
    """
    uses = _uses(model)
    return [
        block
        for block in _members(model)
        if all(count == uses[parameter] for parameter, count in _uses(block).items())
    ]


def layers(model: nn.Module) -> list[list[int]]:
    """The trainable parameters of each layer, as their places among all of them: each repeated
    block, and any other module with its own ones.
    """
    places = {parameter: place for place, parameter in enumerate(trainable(model))}
    inside = {module: block for block in blocks(model) for module in block.modules()}
    found: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in places:
                found.setdefault(inside.get(module, module), []).append(
                    places.pop(parameter)
                )  # Tied ones at their first place.
    return list(found.values())


def fill_whole(model: nn.Module, fill: Fill) -> None:
    """Fill a model that stays in one piece."""
    for block in blocks(model):
        fill(model, block)
    fill(model, model)


def _members(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        held = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        found += [child] if held else _members(child)
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter stands."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
