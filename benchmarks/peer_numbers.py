"""The numbers of bench_peers.py: from the readings of a turn to a line of its table."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench_pairs import spread
from peer_job import ROUNDS, STEPS, SYNC_EVERY

Turn = dict[str, Any]
"""What one turn of a library measured; what each number is, `measured` says."""
Peer = dict[str, Any]
"""A library's numbers, medians over its turns: a line of the second table of performance.md.
`failed` says why there are none, and `ratio` is that of steps per second to adloco's."""
MEDIANS = ("steps_per_second", "sync_seconds", "start_seconds", "round_megabytes", "loss")


def measured(readings: Sequence[dict[str, Any]], result: dict[str, Any], began: float) -> Turn:
    """The numbers of a turn.

    Args:
        readings: When each step's batch was asked for, and the loopback's bytes by then.
        result: The final loss on held-out windows, and the library's version.
        began: When the process was started.
    """
    times = [reading["time"] for reading in readings]
    steps = [after - before for before, after in pairwise(times)]
    # A sync follows step H, or in one library step H + 1; it adds to the steps around it.
    ends = range(SYNC_EVERY, len(steps), SYNC_EVERY)
    usual = statistics.median(steps)
    syncs = [steps[at - 1] + steps[at] - 2 * usual for at in ends]
    # Whole rounds, from the middle of the first one to the middle of the last.
    first, last = SYNC_EVERY // 2, STEPS - SYNC_EVERY // 2
    sent = readings[last]["loopback_bytes"] - readings[first]["loopback_bytes"]
    return {
        "version": result["version"],
        # Inner steps of a worker, syncs included.
        "steps_per_second": (last - first) / (times[last] - times[first]),
        "sync_seconds": statistics.median(syncs),
        # Until the first step is done.
        "start_seconds": times[1] - began,
        # Of both ranks together.
        "round_megabytes": sent / (ROUNDS - 1) / 1e6,
        "loss": result["loss"],
    }


def summed_up(method: str, library: str, turns: Sequence[Turn], base: Sequence[Turn]) -> Peer:
    """The line of a library.

    Args:
        method: What was trained.
        library: With which library.
        turns: Its turns.
        base: Those of adloco with the same method; the n-th of both were taken one soon after the
            other.
    """
    speeds = ([turn["steps_per_second"] for turn in of_side] for of_side in (turns, base))
    ratios = [mine / other for mine, other in zip(*speeds, strict=True)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in MEDIANS}
    version = turns[0]["version"]
    about = {"method": method, "library": library, "failed": "", "version": version}
    return about | spread(ratios) | medians


def without(method: str, library: str, failed: str) -> Peer:
    """The line of a library that has no numbers."""
    return {"method": method, "library": library, "failed": failed}
