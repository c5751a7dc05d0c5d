"""Arguments that the commands over many runs share."""

from dataclasses import dataclass

from adloco.cli.arguments import SettingsCommand, argument


@dataclass(kw_only=True)
class StudyCommand(SettingsCommand):
    """A command over many runs."""

    seeds: int = argument(3, "N")
    """Runs of each arm (default: 3)."""
    parallel: int = argument(1, "N")
    """Runs at a time (default: 1)."""
    targets: list[float] = argument([], "LOSS,...")
    """Losses to reach (default: the highest final loss of any run)."""
    link: list[str] = argument([], "BANDWIDTH,LATENCY", again=True)
    """Model the time on a link, for instance 100mbit,20ms; may be given again."""
    force: bool = argument(False)
    """Compare runs with unequal data, model or budget, and mark it everywhere."""
