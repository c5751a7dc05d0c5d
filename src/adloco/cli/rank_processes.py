"""Starts and ends the ranks of a command that runs in several processes of this machine."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from adloco.cli.terminal import print_error
from adloco.config.sections import Recipe
from adloco.distributed.launch.islands import island_shape
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.launch.local_ranks import INTERRUPTED, start_ranks
from adloco.errors import LostRankError, OtherRankError, exit_code, require
from adloco.run.training_run import TrainingRun


def on_ranks(
    count: int,
    recipe: Recipe,
    words: Sequence[str],
    *,
    others_go_on: bool = False,
    replaces: Callable[[], bool] | None = None,
) -> int:
    """Run `adloco WORDS` on several ranks of this machine and return the exit code.

    Args:
        count: Number of ranks.
        recipe: The recipe that they run.
        words: The line after `adloco`.
        others_go_on: As in `start_ranks`, like `replaces`.

    Raises:
        ValueError: The workers of the recipe cannot be spread over that many ranks.
    """
    require(count >= 1, f"--ranks must be >= 1, got {count}")
    shape = recipe.placement
    island_shape(count, len(recipe.method.living_workers), shape.shard_size, shape.replica_size)
    return start_ranks(
        count, words, recipe.run.grace_seconds, others_go_on=others_go_on, replaces=replaces
    )


class RankEnd:
    """How this rank ends if its main thread waits for another one."""

    def __init__(self) -> None:
        self.run: TrainingRun | None = None
        """The run that this rank trains; None: there is none yet."""
        self.folder: Path | None = None
        """The run that a lost rank leaves to be resumed; None: there is none yet."""

    def after_loss(self) -> None:
        """Let the main thread leave the inner steps that it takes."""
        if self.run:
            self.run.stop()

    def after_failure(self, error: OtherRankError) -> None:
        """Print the error of another rank and end this process."""
        self._end(str(self.advised(error)), exit_code(error))

    def after_signal(self, number: int) -> None:
        """Say that the signal came while this rank waited for another one; end this process."""
        self._end(
            f"told to stop by {signal.Signals(number).name}, but another rank did not come within "
            "run.grace_seconds; what was trained since the newest checkpoint is lost; go on with: "
            f"adloco train --resume {self.folder}",
            INTERRUPTED,
        )

    def advised(self, error: OtherRankError) -> OtherRankError:
        """The error, with the line that resumes the run if a rank was lost."""
        if not isinstance(error, LostRankError) or self.folder is None:
            return error
        return LostRankError(f"{error}; go on with: adloco train --resume {self.folder}")

    def _end(self, message: str, code: int) -> None:
        log = logging.getLogger(__name__)
        if log.hasHandlers():  # Else logging itself would print the message, before training.
            log.error("%s", message)
        print_error(message, f"adloco (rank {this_rank()})")
        if self.run:
            self.run.saving.wait()
        os._exit(code)
