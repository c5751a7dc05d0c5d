"""The part of bench.py about Muon: a training step with it against one with AdamW, whole and on
shards.
"""

from collections.abc import Iterator

import torch.distributed as dist
from bench_loop import BATCH, WIDTHS, batching, problem
from bench_pairs import Row, Seconds, chosen, in_turns

from adloco import AdLoCo, InnerAdamW, InnerMuon, Method, Syncing, place
from adloco.distributed.testing import run_on_ranks

STEPS = 5
"""Inner steps of a turn."""
GOALS = {1: 1.15, 2: 1.25}
"""The largest ratio that is good enough, by the number of shards."""


def muon(*, quick: bool) -> Iterator[Row]:
    """Rounds of the default model with Muon against those with AdamW."""
    for shards, pairs in chosen([(1, 40), (2, 30)], quick):
        seconds, parameters = run_on_ranks(
            optimizer_times, shards, WIDTHS[1], pairs, timeout_seconds=600
        )[0]
        where = "one thread" if shards == 1 else f"{shards} shards on {shards} ranks"
        yield Row.of(
            f"Muon, {parameters / 1e6:.1f}M parameters, {STEPS} steps of {BATCH} samples, {where}",
            "AdamW",
            seconds["Muon"],
            seconds["AdamW"],
            goal=GOALS[shards],
        )


def optimizer_times(width: int, pairs: int) -> tuple[Seconds, int]:
    """Seconds of STEPS inner steps with each optimizer, and the model's number of parameters.

    The model is sharded over the ranks that call it; each rank computes on one thread.
    """
    runs = {
        name: AdLoCo(
            problem(width),
            Method(sync_every=STEPS),
            inner=inner,
            syncing=Syncing(outer=None),
            batching=batching(),
            placement=place(1, shard_size=0),
        )
        for name, inner in (("AdamW", InnerAdamW()), ("Muon", InnerMuon()))
    }
    sides = {name: run.round for name, run in runs.items()}
    return in_turns(sides, pairs, meet=dist.barrier), runs["Muon"].num_parameters
