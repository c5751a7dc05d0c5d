"""Figures 1 and 2 of arXiv 2508.18182 as published, at a size for two CPU cores: outer SGD with a
rate of 0.5 and no momentum on both sides, four workers, the plug-in norm test, merges of the two
smallest requests.

.venv/bin/python reproduce/as_published.py
    # 20 runs, five seeds of each arm; as_published.csv keeps their numbers

All arms take 240 inner steps from the same parameters. DiLoCo has a constant batch of 8 samples,
the 2 of each worker with which AdLoCo's trainers begin. The two others are controls: AdLoCo without
merging, and one trainer with all four workers and the norm test. Further words are those of `adloco
compare`. The same for who has GPUs and the hub:

adloco compare adloco-paper diloco-paper --seeds 5
"""

import csv
import sys
from pathlib import Path

from adloco.cli.main import main

SMALL = "adloco-paper-small"
TOGETHER = "--method.num_trainers 1 --method.workers_per_trainer 4 --merge.policy none"
ARMS = [
    f"AdLoCo={SMALL}",
    f"DiLoCo={SMALL}@{TOGETHER} --batch.rule constant --batch.initial 8 --switch.mode always",
    f"without merging={SMALL}@--merge.policy none",
    f"one trainer of four workers, norm test={SMALL}@{TOGETHER} --batch.initial 8",
]
FOLDER = Path("runs/reproduce/as-published")
WORDS = ["--seeds", "5", "--link", "100mbit,20ms", "--run.folder", str(FOLDER)]


def keep(compared: Path, file: Path) -> None:
    """Copy the rows of a comparison, without the runs' folders."""
    rows = list(csv.DictReader(compared.open()))
    names = [name for name in rows[0] if name != "folder"]
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    code = main(["compare", *ARMS, *WORDS, *sys.argv[1:]])
    if (FOLDER / "compare.csv").exists() and "--run.folder" not in sys.argv:
        keep(FOLDER / "compare.csv", Path(__file__).with_suffix(".csv"))
    sys.exit(code)
