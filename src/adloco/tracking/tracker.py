"""What an experiment tracker is, and how those of accelerate are opened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

PROJECT = "adloco"


class Tracker(Protocol):
    """Follows a run from its start, or from where it is resumed."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Take the numbers of a round by name. step: tokens trained on so far."""
        ...

    def finish(self) -> None:
        """Close what was opened."""
        ...


class TrackerSettings(Protocol):
    """A kind of tracker. It is built without arguments, and in the first process alone."""

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        """Begin to follow a run.

        Args:
            folder: The run's folder.
            settings: Every setting by `section.key`: numbers and texts.
            tokens: Trained on so far; more than 0 if the run is resumed. Rounds after the
                checkpoint are then trained, and logged, again.
        """
        ...


def open_with_accelerate(
    name: str, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Tracker:
    """The tracker of this name in accelerate, built with these options, started, and told the
    settings.
    """
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import patch_environment

    # accelerate's classes ask its state who is the main process. Taken for a process of its own, on
    # the CPU, it neither joins nor starts a process group and sets neither the current device nor
    # the number of threads.
    with patch_environment(LOCAL_RANK=-1, ACCELERATE_TORCH_DEVICE="cpu"):
        PartialState()
    tracker = LOGGER_TYPE_TO_CLASS[name](**options)
    tracker.start()
    tracker.store_init_configuration(dict(settings))
    return tracker  # type: ignore[no-any-return]
