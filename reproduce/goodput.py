"""How much of their time 2 to 256 spot nodes train if nodes are lost: simulated, not measured.

.venv/bin/python reproduce/goodput.py [--png reproduce/goodput.png]

By `plan/simulation.py`, DiLoCo with rounds of 100 steps of 1 s and a sync of 4 s, 5% jitter. A node
is lost 1, 3 or 8 times a day: preemptible VMs live for a day at most (arXiv 1911.05160); the others
are 12% and 28% an hour, within the 10% to 33% an hour of the traces of spot GPUs that Bamboo is
evaluated on (arXiv 2204.12013). Three answers to a loss:

- wait: all wait for a new node, which takes 10 minutes, and repeat the round;
- re-place: the lost node's workers move to the others within 5 s, and the round is repeated. That
  these are slower until the node is back is not simulated, so this is an upper bound;
- drop: the others go on, and the node comes back after 10 minutes, at the beginning of a round.
"""

import argparse
import math
from pathlib import Path

from matplotlib.figure import Figure

from adloco.plan.cluster import Cluster
from adloco.plan.round_time import Sync
from adloco.plan.simulation import OnFailure, simulate

ISLANDS, LOSSES, ROUNDS = (2, 4, 8, 16, 32, 64, 128, 256), (1, 3, 8), 300
ANSWERS: dict[str, tuple[OnFailure, float]] = {
    "wait": ("repeat", 600.0),
    "re-place": ("repeat", 5.0),
    "drop": ("drop", 600.0),
}
STEP_SECONDS, EVERY, SYNC_SECONDS = 1.0, 100, 4.0


def goodput(islands: int, losses: float, answer: str) -> float:
    """Part of the nodes' time in which they train steps that count; nan if no round ends."""
    on_failure, restart_seconds = ANSWERS[answer]
    cluster = Cluster(
        islands=islands,
        bandwidth="1gbit",
        sync_seconds=SYNC_SECONDS,
        jitter=0.05,
        failures_per_day=losses,
        restart_seconds=restart_seconds,
        samples_per_second={1: 1 / STEP_SECONDS},
    )
    sync = Sync(workers=islands, bytes_sent=0)
    steps = [STEP_SECONDS] * islands
    try:
        found = simulate(cluster, steps, EVERY, [sync], rounds=ROUNDS, on_failure=on_failure)
    except ValueError:
        return math.nan
    return found.time.utilisation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--png", type=Path, default=Path("reproduce/goodput.png"))
    known = parser.parse_args()
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(LOSSES), sharey=True)
    print("| losses of a node in a day | answer | " + " | ".join(map(str, ISLANDS)) + " |")
    print("|---:|---|" + "---:|" * len(ISLANDS))
    for panel, losses in zip(panels, LOSSES, strict=True):
        for answer in ANSWERS:
            found = [goodput(islands, losses, answer) for islands in ISLANDS]
            cells = ["-" if math.isnan(part) else f"{part:.0%}" for part in found]
            print(f"| {losses} | {answer} | " + " | ".join(cells) + " |", flush=True)
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
    figure.savefig(known.png, dpi=110)
    print(f"\n{known.png}")


if __name__ == "__main__":
    main()
