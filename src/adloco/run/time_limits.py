"""Compares what a run has measured with the time that its settings grant."""

from adloco.config.settings import RunSettings


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


def slow_ranks(settings: RunSettings, longest: float) -> str:
    """A warning that a rank may be waited for longer than run.timeout_seconds; empty if not.

    Args:
        settings: The run's settings.
        longest: Seconds of the longest round or checkpoint.
    """
    if longest <= settings.timeout_seconds:
        return ""
    return (
        f"a round or checkpoint of this run took {longest:.0f} s, longer than run.timeout_seconds "
        f"= {settings.timeout_seconds:g}: ranks wait for a slow one at most ten times that; set "
        f"it to {2 * longest:.0f} or more"
    )
