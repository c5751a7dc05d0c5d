"""The protocols of an experiment tracker and of its kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Follows a run from its start, or from where it is resumed."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the numbers of a round.

        Args:
            values: The numbers by name.
            step: Tokens trained on so far.
        """

    def finish(self) -> None:
        """Close the tracker."""


class TrackerSettings(Protocol):
    """A kind of tracker. It is built without arguments, and in rank 0 alone."""

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        """Begin to follow a run.

        Args:
            folder: The run's folder.
            settings: Every setting by `section.key`, as a number, bool or string.
            tokens: Tokens trained on so far; more than 0 if the run is resumed. Rounds after the
                checkpoint are then trained, and logged, again.
        """
