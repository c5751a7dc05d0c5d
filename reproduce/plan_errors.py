"""How far do a plan's closed form and its intervals err? Simulated, nothing is measured.

.venv/bin/python reproduce/plan_errors.py [--rounds 2000] [--cases 200]

1. A round in closed form against its simulation event by event (`plan/simulation.py`), where they
   differ most: fragments that take about as long as the steps beside them, on workers with jitter.
2. The interval of the tokens to a loss: 16 runs (four arms, four budgets) are drawn from a known
   law, with errors of 1% in the loss. The intervals should hold the true tokens in 90% of cases.
"""

import argparse
import math

import numpy as np

from adloco.plan.cluster import Cluster
from adloco.plan.loss_law import LossLaw, fit_loss_law
from adloco.plan.loss_points import LossPoint
from adloco.plan.round_time import Sync, round_time
from adloco.plan.simulation import simulate

ISLANDS, EVERY, FRAGMENTS, TAU, STEP_SECONDS, JITTER = 8, 50, 4, 4, 0.5, 0.2
TRANSFERS = (0.0, 1.0, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0)
"""Seconds of a fragment's transfer, beside steps of TAU x STEP_SECONDS = 2 s."""
LAW = LossLaw(
    irreducible=1.6,
    scale=60,
    exponent=0.35,
    critical_batch=20,
    methods={"ddp": 1, "diloco": 1.3},
    sync_exponent=0.05,
)
ARMS = (("ddp", 8, 1), ("ddp", 32, 1), ("diloco", 8, 10), ("diloco", 32, 50))
BUDGETS, TARGET_TOKENS = (1e5, 2e5, 4e5, 8e5), 1.6e6
NOISE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--cases", type=int, default=200)
    known = parser.parse_args()
    compare_rounds(known.rounds)
    count_intervals(known.cases)


def compare_rounds(rounds: int) -> None:
    """Print how much longer simulated rounds take than closed ones."""
    cluster = Cluster(
        islands=ISLANDS, bandwidth="8mbit", jitter=JITTER, samples_per_second={1: 1 / STEP_SECONDS}
    )
    steps = [STEP_SECONDS] * ISLANDS
    print("| seconds of a transfer | simulated / closed form | standard error |")
    print("|---:|---:|---:|")
    for seconds in TRANSFERS:
        sent = cluster.link.bytes_per_second * seconds * FRAGMENTS
        sync = Sync(workers=ISLANDS, bytes_sent=sent, fragments=FRAGMENTS, tau=TAU)
        found = simulate(cluster, steps, EVERY, [sync], rounds=rounds)
        closed = round_time(cluster, steps, EVERY, sync).total
        ratio, error = found.time.total / closed - 1, found.errors["total"] / closed
        print(f"| {seconds} | {ratio:+.2%} | {error:.2%} |", flush=True)


def count_intervals(cases: int) -> None:
    """Print in how many cases the interval holds the true tokens."""
    loss = LAW.loss_at(TARGET_TOKENS, method="diloco", batch=16, sync_every=20)
    held = finite = 0
    for seed in range(cases):
        random = np.random.default_rng(seed)
        points = [
            LossPoint(
                run=f"{method} {batch} {every} {tokens}",
                method=method,
                tokens=tokens,
                loss=LAW.loss_at(tokens, method=method, batch=batch, sync_every=every)
                * (1 + NOISE * random.standard_normal()),
                batch=batch,
                sync_every=every,
            )
            for tokens in BUDGETS
            for method, batch, every in ARMS
        ]
        between = fit_loss_law(points).tokens_interval(
            loss, method="diloco", batch=16, sync_every=20
        )
        if between:
            low, high = between
            held += low <= TARGET_TOKENS <= high
            finite += math.isfinite(high)
        if (seed + 1) % 50 == 0 or seed + 1 == cases:
            print(
                f"{seed + 1} cases: {held} intervals hold the tokens, {finite} are finite",
                flush=True,
            )


if __name__ == "__main__":
    main()
