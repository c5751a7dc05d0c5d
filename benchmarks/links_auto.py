"""Does a run that chooses H itself (`auto.chooses`) need less time over a slow link?

Trains DiLoCo over shaped links (`links.py`) with the recipe's H and with auto, on the same tokens.

    .venv/bin/python benchmarks/links_auto.py [--bandwidth 10mbit] [--tokens 300000]

Each is trained twice, in the order of default, auto, auto, default. The last column is what a run
would take if all steps took as long as the median step of all runs: on a busy machine, steps of one
run take longer than those of another. Settings of adloco may be given, as for links.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINKS = Path(__file__).with_name("links.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", default="10mbit")
    parser.add_argument("--tokens", type=int, default=300_000)
    known, settings = parser.parse_known_args()
    runs = [train(every, known, settings) for every in ("default", "auto", "auto", "default")]
    step = statistics.median(run.step_seconds for run in runs)
    print("| H | seconds | outside of steps | syncs | loss | seconds with equal steps |")
    print("|---|---:|---:|---:|---:|---:|")
    for run in runs:
        print(
            f"| {run.every} | {run.seconds:.0f} | {run.outside:.0f} | {run.syncs} | {run.loss:.3f} "
            f"| {run.outside + run.steps * step:.0f} |"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run took."""

    every: str
    seconds: float
    outside: float
    """Seconds outside of inner steps."""
    steps: int
    syncs: int
    loss: float

    @property
    def step_seconds(self) -> float:
        return (self.seconds - self.outside) / self.steps


def train(every: str, known: argparse.Namespace, settings: Sequence[str]) -> Run:
    """Train DiLoCo over the links."""
    chosen = ["--auto.chooses", "[sync_every]"] if every == "auto" else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        command = [sys.executable, str(LINKS), "--arms", "diloco-fp32"]
        command += ["--bandwidth", known.bandwidth, "--tokens", str(known.tokens)]
        command += ["--json", str(file), "--png", str(file.with_suffix(".png"))]
        command += ["--evaluation.every", "5", *chosen, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (found,) = json.loads(file.read_text())["arms"].values()
    print(f"{every}: {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    return Run(
        every=every,
        seconds=found["seconds"],
        outside=found["outside_inner_steps"] * found["seconds"],
        steps=found["rounds"][-1]["inner_steps"],
        syncs=found["syncs"],
        loss=found["val_loss"],
    )


if __name__ == "__main__":
    main()
