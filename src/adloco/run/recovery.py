"""Finds the checkpoint from which a run goes on: the newest one that is not damaged."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.run import checkpoint
from adloco.run.checkpoint import DAMAGED, DamagedCheckpointError


def load_newest_good(
    folder: Path, placement: Placement
) -> tuple[Path, Any, list[DamagedCheckpointError]]:
    """Load the newest checkpoint that is not damaged. Every rank loads the one that rank 0 chooses.

    Args:
        folder: Folder of all checkpoints of the run.
        placement: The ranks.

    Returns:
        The checkpoint, its state, and on rank 0 the damaged ones that are newer.

    Raises:
        ValueError: No checkpoint is good, or the chosen one is damaged where this rank reads it.
    """
    names = placement.agree([path.name for path in reversed(checkpoint.list_all(folder))])
    require(bool(names), f"{folder} has no checkpoint; start the run again in another folder")
    damaged: list[DamagedCheckpointError] = []
    for name in names:
        problem, state = None, None
        try:
            state = checkpoint.load(folder / name)
        except DamagedCheckpointError as error:
            problem = error
        if placement.agree(problem is None):
            if problem:
                raise problem
            return folder / name, state, damaged
        if problem:
            damaged.append(problem)
    found = "; ".join(f"{error.checkpoint.name}: {error.damage}" for error in damaged)
    raise ValueError(
        f"no checkpoint in {folder} is good ({found}); start the run again in another folder"
    )


def set_aside(damaged: Sequence[DamagedCheckpointError], chosen: Path) -> list[str]:
    """Rename damaged checkpoints, so that they do not count any more.

    Args:
        damaged: The checkpoints.
        chosen: The checkpoint from which the run goes on.

    Returns:
        A sentence for each.
    """
    for error in damaged:
        target = error.checkpoint.with_name(f"{DAMAGED}{error.checkpoint.name}")
        shutil.rmtree(target, ignore_errors=True)  # Of the same round, damaged before.
        error.checkpoint.replace(target)
    return [
        f"checkpoint {error.checkpoint} is damaged ({error.damage}) and is now called "
        f"{DAMAGED}{error.checkpoint.name}; the run goes on from {chosen.name}"
        for error in damaged
    ]
