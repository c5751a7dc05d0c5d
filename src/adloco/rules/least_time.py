"""Which H takes the least time to a loss (docs/theory.md), from measured seconds.

A round of H steps takes H step_seconds + sync_seconds, and the samples to a loss grow as H^cost. So
the time to a loss is proportional to H^cost (step_seconds + sync_seconds / H). Its derivative is
zero at H = sync_seconds (1 - cost) / (cost step_seconds), where syncs take the share `cost` of the
time.
"""

import math


def fastest_sync_every(*, sync_seconds: float, step_seconds: float, cost: float) -> float:
    """The H with the least time to a loss; 0 if syncs take no time, infinite if only they do.

    Args:
        sync_seconds: Seconds that training stops for the syncs of a round.
        step_seconds: Seconds of an inner step.
        cost: Exponent, in (0, 1), with which the samples to a loss grow with H.
    """
    if step_seconds == 0:
        return math.inf if sync_seconds > 0 else 0.0
    return sync_seconds * (1 - cost) / (cost * step_seconds)
