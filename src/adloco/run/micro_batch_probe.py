"""Finds the largest micro-batch that fits on this device (b_max, `switch.max_micro_batch`) by
training real steps. All ranks get the same answer.

The probe trains a step of each size on the run's own data, with a worker like those of the run. A
size fits if the worker's peak memory is within its budget: `memory.fraction` of the free memory,
less the trainers' global parameters and outer momentum, divided by the workers that share the
device.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from adloco.algorithms.method import Execution
from adloco.config.recipe_text import to_values
from adloco.config.sections import Recipe
from adloco.data.files import expanded
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.models.source import Builder, num_bytes
from adloco.rules.micro_batch_search import Measured, largest_micro_batch
from adloco.run.memory_use import held_bytes, machine_bytes
from adloco.run.probe_worker import NO_END, ProbeWorker
from adloco.tasks.task import Task

OUTER_COPIES = 2
"""A trainer's global parameters and their momentum, each as large as the model."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The result of a probe."""

    max_micro_batch: int
    budget_bytes: int
    """Memory that one worker may take."""
    measured: tuple[Measured, ...]
    """Every size that was measured, in rising order."""
    cached: bool
    """True if the answer comes from an earlier probe."""


def outer_copies(recipe: Recipe, device: torch.device) -> int:
    """The memory of all trainers' global parameters and outer momentum on the device.

    Returns:
        A multiple of the model's size in its own data type; 0 if they are kept on the host.
    """
    elsewhere = recipe.outer_memory.on_host and device.type != "cpu"
    size = 2 if recipe.model_options.dtype == "bf16" and recipe.outer_memory.dtype == "fp32" else 1
    return 0 if elsewhere else OUTER_COPIES * size * recipe.method.num_trainers


def option_copies(recipe: Recipe, workers: int, device: torch.device) -> int:
    """The memory that options take for these workers, as a multiple like that of `outer_copies`."""
    outer = outer_copies(recipe, device)
    return sum(
        option.copies(outer, workers, feedback=recipe.keeps_residuals)
        for option in recipe.options.values()
    )


def probe(
    recipe: Recipe,
    task: Task,
    builder: Builder,
    placement: Placement,
    precision: torch.dtype | None,
    *,
    again: bool = False,
) -> Probe:
    """Find the largest micro-batch that fits.

    Args:
        recipe: The run's recipe.
        task: The task with its data, which provides the longest samples.
        builder: Builds the run's model.
        placement: Where the run's workers live.
        precision: Data type for autocast; None for fp32.
        again: Measure even if the cache has an answer for the same model, settings and device.

    Raises:
        ValueError: Not even one sample fits, or `memory.gib` is missing or too small.
    """
    file = (
        expanded(recipe.data.cache)
        / "probes"
        / f"{_key(recipe, builder, placement, precision)}.json"
    )
    known = placement.agree(None if again else _read(file))
    if known:
        return _from_json(known)
    together = int(placement.largest(len(placement.local(recipe.method.living_workers))))
    # All ranks must decide alike which sizes to try, or some would wait for the others for ever.
    free = -int(placement.largest(-_free_bytes(recipe.memory.gib, placement.device)))
    copies = outer_copies(recipe, placement.device)
    copies += option_copies(recipe, together, placement.device)
    outer = copies * num_bytes(builder) // placement.shards
    held = recipe.memory.gib - free / 2**30
    require(
        free > 0,
        f"memory.gib {recipe.memory.gib} is less than the {held:.1f} GiB that this process holds "
        "already; raise it",
    )
    budget = int((recipe.memory.fraction * free - outer) / together)
    trainers = f"{recipe.method.num_trainers} trainers' global parameters"
    require(
        budget > 0,
        f"{recipe.memory.fraction:g} (memory.fraction) of the {free / 2**30:.1f} GiB of free "
        f"memory does not hold {trainers}; use fewer trainers, or give more memory",
    )
    worker = ProbeWorker(
        recipe,
        task.loss,
        task.largest_source(),
        builder,
        placement,
        Execution(autocast=precision, seed=recipe.run.seed),
    )

    def measure(size: int) -> Measured:
        peak, seconds = worker.peak(size)
        most = int(placement.largest(peak))
        return Measured(
            micro_batch=size,
            peak_bytes=most,
            seconds=seconds if most < NO_END else 0.0,
            fits=most <= budget,
        )

    # The ranks of an island split a worker's batch, so none ever trains on more than its part of
    # batch.maximum.
    largest = math.ceil(recipe.guards.maximum / placement.ranks_per_worker)
    found, measured = largest_micro_batch(
        measure, limit_bytes=(free - outer) // together, largest=largest
    )
    result = Probe(
        max_micro_batch=found, budget_bytes=budget, measured=tuple(measured), cached=False
    )
    if placement.is_rank_zero:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def _read(file: Path) -> dict[str, Any] | None:
    """The content of a cached probe; None if there is none, or if it is damaged."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _from_json(content)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return content


def _from_json(content: dict[str, Any]) -> Probe:
    measured = tuple(Measured(**row) for row in content["measured"])
    return Probe(**(content | {"measured": measured, "cached": True}))


def _key(
    recipe: Recipe, builder: Builder, placement: Placement, precision: torch.dtype | None
) -> str:
    """A digest of everything on which the answer depends."""
    device, values = placement.device, to_values(recipe)
    about = [
        builder.config.to_dict(),
        asdict(builder.options),
        values["task"],
        recipe.data.tokenizer,
        recipe.data.context_tokens,
        values["inner"],
        asdict(recipe.method),
        asdict(recipe.memory),
        asdict(recipe.outer_memory),
        option_copies(recipe, 1, device),
        recipe.batch.measurement,
        recipe.keeps_residuals,
        recipe.batch.fewest_groups,
        recipe.guards.maximum,
        recipe.run.compile,
        str(precision),
        placement.num_ranks,
        placement.ranks_per_worker,
        placement.shards,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        metadata.version("torch"),
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _free_bytes(gib: float, device: torch.device) -> int:
    """Bytes that the run may still take: the given GiB less what this process has already, or for 0
    GiB the free memory of the GPU.
    """
    if gib > 0:
        there = machine_bytes() / 2**30
        # A process on a CPU that takes more than there is would be killed.
        require(
            gib <= there or device.type == "cuda",
            f"memory.gib must be <= {there:.1f}, the memory of this machine, got {gib:g}",
        )
        return int(gib * 2**30) - held_bytes(device)
    require(
        device.type == "cuda",
        "the largest micro-batch cannot be found on a CPU without memory.gib, the memory that this "
        "process may take; set it, as in --memory.gib 4 (recipe section [memory])",
    )
    return (
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
    )
