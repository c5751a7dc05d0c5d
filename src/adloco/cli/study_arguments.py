"""Arguments that the commands over many runs share."""

from collections.abc import Sequence
from dataclasses import dataclass

from adloco.cli.arguments import SettingsCommand, argument
from adloco.errors import require


@dataclass(kw_only=True)
class StudyCommand(SettingsCommand):
    """A command over many runs."""

    seeds: int = argument(3, "N")
    """Runs of each arm (default: 3)."""
    parallel: int = argument(1, "N")
    """Runs at a time (default: 1)."""
    targets: list[str] = argument([], "LOSS,...")
    """Losses to reach (default: the highest final loss of any run)."""
    link: list[str] = argument([], "BANDWIDTH,LATENCY", again=True)
    """Model the time on a link, for instance 100mbit,20ms; may be given again."""
    force: bool = argument(False)
    """Compare runs with unequal data, model or budget, and mark it everywhere."""


def parse_targets(words: Sequence[str]) -> list[float]:
    """The losses in --targets.

    Raises:
        ValueError: One of them is no positive number.
    """
    try:
        targets = [float(word) for word in words]
    except ValueError as error:
        raise ValueError(
            f"--targets must be numbers as in 1.6,1.5, got {','.join(words)!r}"
        ) from error
    require(
        all(target > 0 for target in targets), f"--targets must be > 0, got {','.join(words)!r}"
    )
    return targets
