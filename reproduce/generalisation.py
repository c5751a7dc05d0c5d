"""Do large batches generalise worse? A small text read many times, with small, large and adaptive
batches: the final validation loss, and its distance from the training loss.

.venv/bin/python reproduce/generalisation.py
    # 9 runs, three seeds of each arm

The training loss is the mean over the last tenth of a run's inner steps. Further words are those of
`adloco compare`.
"""

import json
import sys
from pathlib import Path
from statistics import mean

from adloco.cli.main import main

FOLDER = Path("runs/reproduce/generalisation")
ARMS = [
    "constant 8=local-sgd",
    "constant 64=local-sgd@--batch.initial 64",
    "adaptive=local-sgd@--batch.rule norm-test --batch.eta 0.5 --batch.smoothing 0.8 "
    "--batch.max_growth 2 --batch.minimum 8 --batch.maximum 64",
]
COMMON = ["--run.tokens", "600000", "--inner.lr", "2e-3", "--seeds", "3", "--data.samples", "12"]


def show_gaps(folder: Path) -> None:
    """Print each run's final training and validation loss, and the gap."""
    for run in sorted(folder.glob("runs/*/metrics.jsonl")):
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        late = [row for row in rows if row["inner_steps"] > 0.9 * rows[-1]["inner_steps"]]
        train, valid = mean(row["train_loss"] for row in late), rows[-1]["val_loss"]
        print(
            f"{run.parent.name}: training {train:.3f}, validation {valid:.3f}, gap "
            f"{valid - train:+.3f}"
        )


if __name__ == "__main__":
    code = main(["compare", *ARMS, *COMMON, "--run.folder", str(FOLDER), *sys.argv[1:]])
    if not code:
        show_gaps(FOLDER)
    sys.exit(code)
