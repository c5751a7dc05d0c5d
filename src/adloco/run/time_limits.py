"""Compares what a run has measured with the time that its settings grant."""

from collections.abc import Sequence
from itertools import pairwise

from adloco.config.settings import RunSettings
from adloco.metrics import Record


def late_checkpoint(settings: RunSettings, checkpoint_seconds: float) -> str:
    """A warning that a checkpoint takes longer than run.grace_seconds; empty if it does not.

    Args:
        settings: The run's settings.
        checkpoint_seconds: What the last checkpoint took.
    """
    if checkpoint_seconds <= settings.grace_seconds:
        return ""
    return (
        f"the last checkpoint took {checkpoint_seconds:.0f} s, longer than run.grace_seconds = "
        f"{settings.grace_seconds:g}: a run that is told to stop may be killed before it has "
        "saved; let the launcher or scheduler wait longer (torchrun --shutdown-timeout) and set "
        "run.grace_seconds to that"
    )


def slow_ranks(settings: RunSettings, history: Sequence[Record], checkpoint_seconds: float) -> str:
    """A warning that a rank may be waited for longer than run.timeout_seconds; empty if not.

    Args:
        settings: The run's settings.
        history: The lines of metrics.jsonl.
        checkpoint_seconds: What the last checkpoint took.
    """
    times = [0.0, *(record["seconds"] for record in history)]
    longest = max([checkpoint_seconds, *(end - begin for begin, end in pairwise(times))])
    if longest <= settings.timeout_seconds:
        return ""
    return (
        f"a round or checkpoint of this run took {longest:.0f} s, longer than run.timeout_seconds "
        f"= {settings.timeout_seconds:g}: ranks wait for a slow one at most ten times that; set "
        f"it to {2 * longest:.0f} or more"
    )
