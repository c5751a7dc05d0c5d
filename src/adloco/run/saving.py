"""The checkpoints that a run writes, without which it goes on while there is no room for them."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adloco.errors import RunWarning
from adloco.run import checkpoint
from adloco.run.folder import CHECKPOINTS


class Saving:
    """Writes checkpoints, and knows the newest."""

    def __init__(self, folder: Path, *, writes: bool, keep: int) -> None:
        """
        Args:
            folder: The run's folder.
            writes: True if this process writes files; all others only help to make the content.
            keep: Checkpoints to keep.
        """
        self.newest = ""
        """Name of the newest checkpoint."""
        self.seconds = 0.0
        """Seconds that it took; a resumed run knows those of the one before."""
        self.in_progress = False
        """True while a checkpoint is made."""
        self.missing = False
        """True if the last checkpoint that was due found no room."""
        self._folder = folder
        self._writes = writes
        self._keep = keep

    def save(self, name: str, content: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint.

        Args:
            name: Its name.
            content: Makes what it contains; called in all processes.

        Raises:
            OSError: There is no room for it; only where files are written.
        """
        self.in_progress, began = True, time.monotonic()
        try:
            state = content()
            if self._writes:
                checkpoint.save(self._folder / CHECKPOINTS, name, state, self._keep)
        finally:
            self.in_progress, self.seconds = False, time.monotonic() - began
        self.newest, self.missing = name, False

    def try_to_save(self, name: str, content: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save as `save` does; if there is no room, warn, unless this is the last checkpoint.

        Raises:
            ValueError: There is no room for the last checkpoint.
        """
        try:
            self.save(name, content)
        except OSError as error:
            problem = f"cannot be written in {self._folder} ({error.strerror or error})"
            if last:
                raise ValueError(
                    f"the last checkpoint of the run {problem}; make room there, then go on from "
                    f"{self.newest} with: adloco train --resume {self._folder}"
                ) from error
            if not self.missing:
                warnings.warn(
                    f"a checkpoint {problem}; the run goes on and tries again after each round, "
                    f"and the newest checkpoint is {self.newest}",
                    RunWarning,
                    stacklevel=2,
                )
            self.missing = True
