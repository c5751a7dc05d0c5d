"""Finds the largest micro-batch that fits on this device (b_max, `switch.max_micro_batch`) by
training real steps. All ranks get the same answer.

The probe trains a step of each size on the run's own data, with a worker like those of the run. A
size fits if the worker's peak memory is within its budget: `memory.fraction` of the free memory,
less the trainers' global parameters and outer optimizers, divided by the workers that share the
device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adloco.distributed.placement.placement import Placement
from adloco.errors import OutOfMemoryError, require
from adloco.models.source import num_bytes
from adloco.rules.micro_batch_search import Measured, largest_micro_batch
from adloco.run.memory_use import held_bytes, machine_bytes
from adloco.run.opened import Opened, outer_copies
from adloco.run.probe_worker import ProbeWorker

NO_END = 2**62
"""The peak reported for a step that ran out of memory, in bytes: larger than any budget."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The result of a probe."""

    max_micro_batch: int
    budget_bytes: int
    """Memory that one worker may take."""
    measured: tuple[Measured, ...]
    """Every size that was measured, in rising order."""
    largest: int
    """The largest that was asked for, because of batch.maximum."""


def probe(opened: Opened, on_micro_batch: Callable[[int], None] = lambda size: None) -> Probe:
    """Find the largest micro-batch that fits.

    on_micro_batch: Called with each size before it is tried.

    Raises:
        ValueError: Not even one sample fits, or `memory.gib` is missing or too small.
    """
    recipe, placement = opened.recipe, opened.placement
    limit, budget = _limits(opened)
    worker = ProbeWorker(opened, opened.task.largest_source())

    def measure(size: int) -> Measured:
        on_micro_batch(size)
        try:
            peak, seconds = worker.peak(size)
        except OutOfMemoryError:
            peak, seconds = NO_END, 0.0
        most = int(placement.largest(peak))
        ran = most < NO_END
        return Measured(
            micro_batch=size, peak_bytes=most, seconds=seconds * ran, fits=most <= budget
        )

    # The ranks of an island split a worker's batch, so none ever trains on more than its part of
    # batch.maximum.
    largest = math.ceil(recipe.guards.maximum / placement.ranks_per_worker)
    found, measured = largest_micro_batch(measure, limit_bytes=limit, largest=largest)
    return Probe(
        max_micro_batch=found, budget_bytes=budget, measured=tuple(measured), largest=largest
    )


def _limits(opened: Opened) -> tuple[int, int]:
    """Bytes that one worker can take, and those that it may: its budget. The same on all ranks."""
    recipe, placement = opened.recipe, opened.placement
    gib, trainers = recipe.memory.gib, recipe.method.num_trainers
    together = int(placement.largest(len(placement.local(recipe.method.living_workers))))
    # All ranks must decide alike which sizes to try, or some would wait for the others for ever.
    free = -int(placement.largest(-_free_bytes(gib, placement)))
    copies = outer_copies(recipe, placement.device)
    outer = copies * num_bytes(opened.builder) // placement.shards
    require(
        free > 0,
        f"memory.gib {gib} is less than the {gib - free / 2**30:.2f} GiB that this process holds "
        "already; raise it",
    )
    budget = int((recipe.memory.fraction * free - outer) / together)
    require(
        budget > 0,
        f"{recipe.memory.fraction:g} (memory.fraction) of the {free / 2**30:.1f} GiB of free "
        f"memory does not hold {trainers} trainers' global parameters; use fewer trainers, or give "
        "more memory",
    )
    return (free - outer) // together, budget


def _free_bytes(gib: float, placement: Placement) -> int:
    """Bytes that the run may still take: the given GiB less what this process has already, or for 0
    GiB the free memory of the GPU.
    """
    device = placement.device
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
    free = int(torch.cuda.mem_get_info(device)[0]) // placement.ranks_of_device
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
