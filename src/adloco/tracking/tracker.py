"""The protocol of an experiment tracker, and a function that opens accelerate's trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

PROJECT = "adloco"


class Tracker(Protocol):
    """Follows a run from its start, or from where it is resumed."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the numbers of a round.

        Args:
            values: The numbers by name.
            step: Tokens trained on so far.
        """
        ...

    def finish(self) -> None:
        """Close the tracker."""
        ...


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
        ...


def open_with_accelerate(
    name: str, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Tracker:
    """Start the tracker of this name in accelerate and give it the settings.

    Args:
        name: Key in accelerate's `LOGGER_TYPE_TO_CLASS`.
        settings: Every setting by `section.key`; empty: none are stored.
        options: Arguments of the tracker's class.
    """
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import patch_environment

    # accelerate's trackers ask its PartialState which process is the main one. With these variables
    # PartialState takes this process for the only one, on the CPU: it neither joins nor starts a
    # process group, and changes neither the current device nor the number of threads.
    with patch_environment(LOCAL_RANK=-1, ACCELERATE_TORCH_DEVICE="cpu"):
        PartialState()
    tracker = LOGGER_TYPE_TO_CLASS[name](**options)
    tracker.start()
    if settings:
        tracker.store_init_configuration(dict(settings))
    return tracker  # type: ignore[no-any-return]
