"""What a recipe takes on this machine: its largest micro-batch, the speed of an island, and the
size of its model.
"""

from collections.abc import Callable, Sequence

import torch

from adloco.config.sections import Recipe
from adloco.distributed.parallel.layers import layers
from adloco.distributed.placement.placement import Placement
from adloco.models.source import Builder, num_bytes
from adloco.run.environment import choose_precision
from adloco.run.micro_batch_probe import Probe, outer_copies, probe
from adloco.run.start import model_builder, open_task, place_workers, with_reachable_data
from adloco.run.throughput import Throughput, doublings, measure_throughput
from adloco.tasks.task import Task

ADAMW_MOMENTS = 2


def find_micro_batch(recipe: Recipe, *, again: bool) -> tuple[Probe, str]:
    """Find the micro-batch that `switch.max_micro_batch = "auto"` stands for.

    Args:
        recipe: The recipe.
        again: Measure even if an earlier answer is in the cache.

    Returns:
        The result, and a notice for the user if the data's fallback was used.
    """
    probed, notice = _probed(recipe)
    return probe(*probed, again=again), notice


def find_throughput(
    recipe: Recipe,
    micro_batches: Sequence[int],
    *,
    again: bool,
    on_micro_batch: Callable[[int], None],
) -> tuple[Throughput, str]:
    """Measure how fast an island trains.

    Args:
        recipe: The recipe.
        micro_batches: Sizes to measure, in samples; if empty, 1, 2, 4, ... and the largest that
            fits.
        again: Search for the largest even if it is in the cache.
        on_micro_batch: Called with each size before it is measured.

    Returns:
        The result, and a notice for the user if the data's fallback was used.

    Raises:
        ValueError: A size does not fit in memory, or the settings cannot work.
    """
    probed, notice = _probed(recipe)
    sizes = micro_batches or doublings(probe(*probed, again=again).max_micro_batch)
    return measure_throughput(*probed, sizes, on_micro_batch=on_micro_batch), notice


def count_parameters(recipe: Recipe) -> int:
    """Number of parameters of a recipe's model. Reads its data, for the ids of the tokenizer."""
    (_, _, builder, _, _), _ = _probed(recipe)
    return sum(each.numel() for each in builder.parameters)


def checkpoint_bytes(recipe: Recipe) -> int:
    """About how large a checkpoint of a run is that is stopped within a round: the global
    parameters and outer momentum of each trainer; parameters, AdamW's moments and residuals of each
    worker. After a round, workers have no parameters of their own. Muon has only one moment of
    hidden matrices, so its checkpoints are smaller.
    """
    (recipe, _, builder, _, _), _ = _probed(recipe)
    workers = recipe.method.num_workers * (1 + ADAMW_MOMENTS + recipe.keeps_residuals)
    return num_bytes(builder) * (outer_copies(recipe, torch.device("cpu")) + workers)


def count_layers(recipe: Recipe) -> int:
    """Number of layers of a recipe's model, which streaming may sync one by one."""
    (_, _, builder, _, _), _ = _probed(recipe)
    return len(layers(builder()))


def _probed(
    recipe: Recipe,
) -> tuple[tuple[Recipe, Task, Builder, Placement, torch.dtype | None], str]:
    """What a probe measures, and a notice for the user if the data's fallback was used."""
    placement = place_workers(recipe)
    recipe, notice = with_reachable_data(recipe, placement)
    task = open_task(recipe, None, placement)
    precision = choose_precision(recipe.run.precision, placement.device)
    builder = model_builder(recipe, task, None, placement)
    return (recipe, task, builder, placement, precision), notice
