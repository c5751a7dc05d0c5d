"""How much of their time 2 to 256 islands compute, on paper: nothing here is measured.

    .venv/bin/python reproduce/on_paper.py [--png reproduce/plan_on_paper.png]

Models of 7e9 and 70e9 parameters, over 0.1 to 100 Gbit/s, with failures, by the closed form of
`plan/round_time.py`. Assumed: islands of 64 chips with 400 TFLOP/s each in effect, 2^19 tokens of
an island in a step, steps that deviate by 5%, 50 ms of latency, one failure of an island in two
days and 10 minutes until it trains again, during which all wait. AdLoCo after its merges takes
DiLoCo's time at an equal batch.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from adloco.distributed.traffic import ring
from adloco.distributed.wire.int4 import Int4
from adloco.plan.cluster import Cluster
from adloco.plan.gradient_buckets import Buckets
from adloco.plan.round_time import Sync, round_time

ISLANDS = (2, 4, 8, 16, 32, 64, 128, 256)
SIZES, GBITS = (7e9, 70e9), (0.1, 0.3, 1, 3, 10, 30, 100)
CHIPS, CHIP_FLOPS, TOKENS = 64, 400e12, 2**19


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


def utilisation(arm: Arm, parameters: float, islands: int, gbits: float) -> float:
    """The part of the time that computes."""
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
    of_parameter = wire.block_bytes / wire.block if arm.int4 else 2 if arm.every == 1 else 4
    sync = Sync(
        workers=islands,
        bytes_sent=ring(islands) * of_parameter * parameters,
        fragments=arm.fragments,
        tau=arm.tau,
        buckets=Buckets.of(2 * parameters, passes=1) if arm.every == 1 else None,
    )
    return round_time(cluster, [step] * islands, arm.every, sync).utilisation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=Path, default=Path("reproduce/plan_on_paper.png"))
    png = parser.parse_args().png
    for size in SIZES:
        step = 6 * size * TOKENS / (CHIPS * CHIP_FLOPS)
        print(
            f"\n{size / 1e9:g}e9 parameters, {step:.1f} s a step: part of the time that computes\n"
        )
        print(f"| method | islands | {' | '.join(f'{gbits:g} Gbit/s' for gbits in GBITS)} |")
        print("|---|---:|" + "---:|" * len(GBITS))
        for arm in ARMS:
            for islands in (2, 16, 256):
                cells = [utilisation(arm, size, islands, gbits) for gbits in GBITS]
                print(f"| {arm.name} | {islands} | " + " | ".join(f"{c:.0%}" for c in cells) + " |")
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for row, size in zip(panels, SIZES, strict=True):
        for arm in ARMS:
            over = [utilisation(arm, size, 16, gbits) for gbits in GBITS]
            row[0].plot(
                GBITS, over, marker="o", markersize=3, label=arm.name if size == SIZES[0] else None
            )
            over = [utilisation(arm, size, islands, 1.0) for islands in ISLANDS]
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


if __name__ == "__main__":
    main()
