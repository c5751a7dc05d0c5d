"""The numbers of bench_peers.py: from the readings of a turn to a line of its table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from bench_pairs import spread
from peer_job import ROUNDS, STEPS, SYNC_EVERY


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn of a library measured."""

    version: str
    steps_per_second: float
    """Inner steps of a worker, syncs included."""
    sync_seconds: float
    """What a sync adds to the steps around it."""
    start_seconds: float
    """From the start of the process until the first step is done."""
    round_megabytes: float
    """What crosses the loopback in a round, from both ranks together."""
    loss: float
    """Of the final model, on held-out windows."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library's numbers: a line of the second table of docs/performance.md.

    Medians over the turns; of those fields that `Turn` has too, see there.
    """

    method: str
    library: str
    failed: str = ""
    """Why there are no numbers; else empty."""
    version: str = ""
    steps_per_second: float = 0.0
    ratio: float = 0.0
    """Its steps per second over those of adloco's arm in the same turn."""
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    sync_seconds: float = 0.0
    start_seconds: float = 0.0
    round_megabytes: float = 0.0
    loss: float = 0.0


def measured(readings: Sequence[dict[str, Any]], result: dict[str, Any], began: float) -> Turn:
    """The numbers of a turn.

    Args:
        readings: When each step's batch was asked for, and the loopback's bytes by then.
        result: The final loss, and the library's version.
        began: When the process was started.
    """
    times = [reading["time"] for reading in readings]
    steps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(steps)
    # A sync follows step H, or in one library step H + 1.
    syncs = [
        steps[at - 1] + steps[at] - 2 * usual for at in range(SYNC_EVERY, len(steps), SYNC_EVERY)
    ]
    # Whole rounds, from the middle of the first one to the middle of the last.
    first, last = SYNC_EVERY // 2, STEPS - SYNC_EVERY // 2
    sent = readings[last]["loopback_bytes"] - readings[first]["loopback_bytes"]
    return Turn(
        version=result["version"],
        steps_per_second=(last - first) / (times[last] - times[first]),
        sync_seconds=statistics.median(syncs),
        start_seconds=times[1] - began,
        round_megabytes=sent / (ROUNDS - 1) / 1e6,
        loss=result["loss"],
    )


def summed_up(method: str, library: str, turns: Sequence[Turn], base: Sequence[Turn]) -> Peer:
    """The line of a library.

    Args:
        method: What was trained.
        library: With which library.
        turns: Its turns.
        base: Those of adloco with the same method; the n-th of both were taken one soon after the
            other.
    """
    ratios = [
        mine.steps_per_second / other.steps_per_second
        for mine, other in zip(turns, base, strict=True)
    ]
    names = [field.name for field in fields(Turn) if field.name != "version"]
    return Peer(
        method=method,
        library=library,
        version=turns[0].version,
        **{name: statistics.median(getattr(turn, name) for turn in turns) for name in names},
        **spread(ratios),
    )
