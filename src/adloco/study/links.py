"""The time that a run would take if a given link joined its islands: the measured computation, and
the time of its transfers by a model.

Workers on islands of their own exchange in rings (`plan/link.py`). Trainers sync at the same time,
so the one with the most workers is waited for. The records have the bytes of merges as means over
all workers, so they count as bytes of the round's syncs. With streaming a sync runs beside tau
inner steps, and only what is longer is waited for. Data-parallel training syncs in each inner step,
and nothing of it is hidden.
"""

import itertools
from collections.abc import Sequence

from adloco.config.sections import Recipe
from adloco.metrics import Record
from adloco.plan.link import Link
from adloco.rules.sync_schedule import Streaming


def num_syncs(record: Record, recipe: Recipe) -> int:
    """Syncs up to a round; a data-parallel run syncs in each inner step."""
    return int(record["inner_steps" if recipe.data_parallel else "syncs"])


def bytes_sent(record: Record, recipe: Recipe, replicas: int) -> float:
    """Bytes that each worker had sent over links after a round, each on an island of its own.

    replicas: Replicas that a data-parallel run is taken to have, one an island.
    """
    if recipe.data_parallel:
        return float(record["bytes_ddp_equivalent"]) * 2 * (replicas - 1) / replicas
    return float(record["bytes_sent"])


def link_seconds(
    records: Sequence[Record], recipe: Recipe, link: Link, replicas: int
) -> list[float]:
    """The modelled time at the end of each round, in seconds."""
    parallel = recipe.data_parallel
    counts = ("seconds", "tokens", "inner_steps", "syncs", "bytes_sent", "bytes_ddp_equivalent")
    start: Record = dict.fromkeys(counts, 0)
    now, result = 0.0, []
    for before, record in itertools.pairwise([start, *records]):
        sent = bytes_sent(record, recipe, replicas) - bytes_sent(before, recipe, replicas)
        steps = record["inner_steps"] - before["inner_steps"]
        syncs = num_syncs(record, recipe) - num_syncs(before, recipe)
        computed, trained = _computed(record, before)
        rings = [replicas] if parallel else [row["workers"] for row in record["trainers"]]
        times = syncs * (1 if parallel else recipe.streaming.fragments)
        busiest = sent * _busiest(rings)
        transfers = link.seconds(busiest, max(2, *rings), times)
        hidden = 0.0
        if not parallel and syncs:
            beside = _steps_beside(recipe.streaming, steps)
            hidden = sum(min(transfers / times, number * trained / steps) for number in beside)
        now += computed + transfers - hidden
        result.append(now)
    return result


def _computed(record: Record, before: Record) -> tuple[float, float]:
    """Seconds of a round without syncs, and of its inner steps until the slowest worker ended."""
    seconds = record["seconds"] - before["seconds"]
    computed = max(seconds - record["sync"]["exposed_seconds"], 0.0)
    speed = record["tokens_per_second"]
    if not speed:  # Stopped in the round's last step: nothing was left to train in it.
        return computed, computed
    row = record["workers"][0]
    trained = row["busy_seconds"] + row["wait_seconds"]
    evaluated = max(seconds - (record["tokens"] - before["tokens"]) / speed, 0.0)
    # What the first worker waited for the slowest one counts as its sync in the records.
    return max(computed, evaluated + trained), trained


def _steps_beside(streaming: Streaming, steps: int) -> list[int]:
    """Inner steps of a round beside which each fragment is in flight."""
    events = streaming.events(steps)
    left = {event.fragment: event.step for event in events if event.kind == "send"}
    return [event.step - left[event.fragment] for event in events if event.kind == "receive"]


def _busiest(rings: Sequence[int]) -> float:
    """Bytes that leave a worker of the largest ring, as a multiple of the mean over all workers.

    In a ring of W workers each sends 2 (W - 1) / W of the model, and all together 2 (W - 1) of it.

    rings: The number of workers of each trainer.
    """
    widest, sent = max(rings), sum(workers - 1 for workers in rings)
    return sum(rings) * (widest - 1) / widest / sent if sent else 1.0
