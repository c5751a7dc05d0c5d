"""Beyond this machine, on paper: nothing here is measured.

.venv/bin/python reproduce/on_paper.py utilisation [--png reproduce/plan_on_paper.png]
.venv/bin/python reproduce/on_paper.py goodput [--png reproduce/goodput.png]
.venv/bin/python reproduce/on_paper.py errors [--rounds 2000] [--cases 200]

utilisation: how much of their time 2 to 256 islands compute for models of 7e9 and 70e9 parameters,
over 0.1 to 100 Gbit/s, with failures, by the closed form of `plan/round_time.py`. Assumed: islands
of 64 chips with 400 TFLOP/s each in effect, 2^19 tokens of an island in a step, steps that deviate
by 5%, 50 ms of latency, one failure of an island in two days and 10 minutes until it trains again,
during which all wait. AdLoCo after its merges takes DiLoCo's time at an equal batch.

goodput: how much of their time 2 to 256 spot nodes train if nodes are lost, by
`plan/simulation.py`: DiLoCo with rounds of 100 steps of 1 s and a sync of 4 s, 5% jitter. A node is
lost 1, 3 or 8 times a day: preemptible VMs live for a day at most (arXiv 1911.05160); the others
are 12% and 28% an hour, within the 10% to 33% an hour of the traces of spot GPUs that Bamboo is
evaluated on (arXiv 2204.12013). Three answers to a loss:

- wait: all wait for a new node, which takes 10 minutes, and repeat the round;
- re-place: the lost node's workers move to the others within 5 s, and the round is repeated. That
  these are slower until the node is back is not simulated, so this is an upper bound;
- drop: the others go on, and the node comes back after 10 minutes, at the beginning of a round.

errors: how far a plan's closed form and its intervals err. (1) A round in closed form against its
simulation event by event, where they differ most: fragments that take about as long as the steps
beside them, on workers with jitter. (2) The interval of the tokens to a loss: 16 runs (four arms,
four budgets) are drawn from a known law, with errors of 1% in the loss. The intervals should hold
the true tokens in 90% of cases.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from adloco.distributed.comm.compressed import crossings
from adloco.distributed.traffic import ring
from adloco.distributed.wire.int4 import Int4
from adloco.plan.cluster import Cluster
from adloco.plan.gradient_buckets import Buckets
from adloco.plan.loss_law import LossLaw, fit_loss_law
from adloco.plan.loss_points import LossPoint
from adloco.plan.round_time import RoundTime, Sync, round_time
from adloco.plan.simulation import OnFailure, simulate

ISLANDS = (2, 4, 8, 16, 32, 64, 128, 256)
SIZES, GBITS = (7e9, 70e9), (0.1, 0.3, 1, 3, 10, 30, 100)
CHIPS, CHIP_FLOPS, TOKENS = 64, 400e12, 2**19
LOSSES, ANSWERS = (1, 3, 8), {"wait": 600.0, "re-place": 5.0, "drop": 600.0}
"""Losses of a node in a day, and seconds that each answer takes."""
TRANSFERS = (0.0, 1.0, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0)
"""Seconds of a fragment's transfer, beside four steps of 0.5 s."""
LAW = LossLaw(
    irreducible=1.6,
    scale=60,
    exponent=0.35,
    critical_batch=20,
    methods={"ddp": 1, "diloco": 1.3},
    sync_exponent=0.05,
)
RUNS = (("ddp", 8, 1), ("ddp", 32, 1), ("diloco", 8, 10), ("diloco", 32, 50))
BUDGETS, TARGET_TOKENS = (1e5, 2e5, 4e5, 8e5), 1.6e6
NOISE = 0.01


@dataclass(frozen=True)
class Arm:
    """A method: H, its bytes per parameter on the wire, and its overlap."""

    name: str
    every: int
    int4: bool = False
    fragments: int = 1
    tau: int = 0


ARMS = (
    Arm("data-parallel, bf16", 1),
    Arm("DiLoCo H = 100, fp32", 100),
    Arm("DiLoCo H = 100, int4", 100, int4=True),
    Arm("streaming H = 100, int4, 8 fragments, 8 steps in flight", 100, True, 8, 8),
)


def time_of(arm: Arm, parameters: float, islands: int, gbits: float) -> RoundTime:
    """Mean seconds of a round."""
    step = 6 * parameters * TOKENS / (CHIPS * CHIP_FLOPS)
    cluster = Cluster(
        islands=islands,
        bandwidth=f"{gbits}gbit",
        latency="50ms",
        pattern="all-to-all",
        jitter=0.05,
        failures_per_day=0.5,
        restart_seconds=600,
        samples_per_second={1: 1 / step},
    )
    wire = Int4()
    sent = crossings(wire, islands) * wire.block_bytes / wire.block
    bytes_each = sent if arm.int4 else ring(islands) * (2 if arm.every == 1 else 4)
    sync = Sync(
        workers=islands,
        bytes_sent=bytes_each * parameters,
        fragments=arm.fragments,
        tau=arm.tau,
        buckets=Buckets.of(2 * parameters, passes=1) if arm.every == 1 else None,
    )
    return round_time(cluster, [step] * islands, arm.every, sync)


def heads(*names: str, columns: Sequence[object]) -> None:
    """Print the head of a table, whose further columns are numbers."""
    print(f"| {' | '.join([*names, *map(str, columns)])} |")
    print("|---|---:|" + "---:|" * (len(names) + len(columns) - 2))


def show_utilisation(png: Path) -> None:
    for size in SIZES:
        step = 6 * size * TOKENS / (CHIPS * CHIP_FLOPS)
        print(
            f"\n{size / 1e9:g}e9 parameters, {step:.1f} s a step: part of the time that computes\n"
        )
        heads("method", "islands", columns=[f"{gbits:g} Gbit/s" for gbits in GBITS])
        for arm in ARMS:
            for islands in (2, 16, 256):
                cells = [time_of(arm, size, islands, gbits).utilisation for gbits in GBITS]
                print(f"| {arm.name} | {islands} | " + " | ".join(f"{c:.0%}" for c in cells) + " |")
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for row, size in zip(panels, SIZES, strict=True):
        for arm in ARMS:
            over = [time_of(arm, size, 16, gbits).utilisation for gbits in GBITS]
            row[0].plot(
                GBITS, over, marker="o", markersize=3, label=arm.name if size == SIZES[0] else None
            )
            over = [time_of(arm, size, islands, 1.0).utilisation for islands in ISLANDS]
            row[1].plot(ISLANDS, over, marker="o", markersize=3)
        row[0].set_xscale("log")
        row[1].set_xscale("log", base=2)
        row[0].set_xlabel("bandwidth between islands (Gbit/s)")
        row[1].set_xlabel("islands")
        row[0].set_ylabel("part of the time that computes")
        row[0].set_title(f"{size / 1e9:g}e9 parameters, 16 islands")
        row[1].set_title(f"{size / 1e9:g}e9 parameters, 1 Gbit/s")
        for panel in row:
            panel.set_ylim(0, 1)
            panel.grid(alpha=0.25)
            panel.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(png, dpi=110)
    print(f"\n{png}")


def goodput(islands: int, losses: float, answer: str) -> float:
    """Part of the nodes' time in which they train steps that count; nan if no round ends."""
    on_failure: OnFailure = "drop" if answer == "drop" else "repeat"
    cluster = Cluster(
        islands=islands,
        bandwidth="1gbit",
        sync_seconds=4.0,
        jitter=0.05,
        failures_per_day=losses,
        restart_seconds=ANSWERS[answer],
        samples_per_second={1: 1.0},
    )
    sync = Sync(workers=islands, bytes_sent=0)
    try:
        found = simulate(cluster, [1.0] * islands, 100, [sync], rounds=300, on_failure=on_failure)
    except ValueError:
        return math.nan
    return found.time.utilisation


def show_goodput(png: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(LOSSES), sharey=True)
    heads("answer", "losses of a node in a day", columns=ISLANDS)
    for panel, losses in zip(panels, LOSSES, strict=True):
        for answer in ANSWERS:
            found = [goodput(islands, losses, answer) for islands in ISLANDS]
            cells = ["-" if math.isnan(part) else f"{part:.0%}" for part in found]
            print(f"| {answer} | {losses} | " + " | ".join(cells) + " |", flush=True)
            panel.plot(ISLANDS, found, marker="o", markersize=3, label=answer)
        often = "once" if losses == 1 else f"{losses} times"
        panel.set_title(f"a node is lost {often} a day")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("nodes")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("part of the time that trains")
    panels[0].legend(frameon=False)
    figure.savefig(png, dpi=110)
    print(f"\n{png}")


def compare_rounds(rounds: int) -> None:
    """Print how much longer simulated rounds take than closed ones."""
    islands, every, fragments, step = 8, 50, 4, 0.5
    cluster = Cluster(
        islands=islands, bandwidth="8mbit", jitter=0.2, samples_per_second={1: 1 / step}
    )
    steps = [step] * islands
    print("| seconds of a transfer | simulated / closed form | standard error |")
    print("|---:|---:|---:|")
    for seconds in TRANSFERS:
        sent = cluster.link.bytes_per_second * seconds * fragments
        sync = Sync(workers=islands, bytes_sent=sent, fragments=fragments, tau=4)
        found = simulate(cluster, steps, every, [sync], rounds=rounds)
        closed = round_time(cluster, steps, every, sync).total
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
            for method, batch, every in RUNS
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("utilisation", "goodput", "errors"))
    parser.add_argument("--png", type=Path)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--cases", type=int, default=200)
    known = parser.parse_args()
    if known.part == "utilisation":
        show_utilisation(known.png or Path("reproduce/plan_on_paper.png"))
    elif known.part == "goodput":
        show_goodput(known.png or Path("reproduce/goodput.png"))
    else:
        compare_rounds(known.rounds)
        count_intervals(known.cases)


if __name__ == "__main__":
    main()
