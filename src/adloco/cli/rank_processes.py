"""Starts and ends the ranks of a command that runs in several processes of this machine."""

import logging
import os
import sys
from collections.abc import Sequence

from adloco.config.sections import Recipe
from adloco.distributed.launch.launcher import island_shape, this_rank
from adloco.distributed.launch.local_ranks import start_ranks
from adloco.errors import require


def on_ranks(count: int, recipe: Recipe, words: Sequence[str]) -> int:
    """Run `adloco WORDS` on several ranks of this machine and return the exit code.

    Args:
        count: Number of ranks.
        recipe: The recipe that they run.
        words: The line after `adloco`.

    Raises:
        ValueError: The workers of the recipe cannot be spread over that many ranks.
    """
    require(count >= 1, f"--ranks must be >= 1, got {count}")
    shape = recipe.placement
    island_shape(count, recipe.method.num_workers, shape.shard_size, shape.replica_size)
    return start_ranks(count, words)


def end_rank(message: str) -> None:
    """Print the message and end this process at once, also if it waits for a rank that failed."""
    log = logging.getLogger(__name__)
    if log.hasHandlers():  # Else logging itself would print the message, before training begins.
        log.error("%s", message)
    print(f"adloco (rank {this_rank()}): {message}", file=sys.stderr, flush=True)
    os._exit(2)
