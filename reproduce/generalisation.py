"""Do large batches generalise worse? A small text read many times, with small, large and adaptive
batches: the final validation loss, and its distance from the training loss.

.venv/bin/python reproduce/generalisation.py
    # 9 runs, three seeds of each arm

The training loss is the mean over the samples of the last tenth of a run's inner steps. Further
words are those of `adloco compare`.
"""

import json
import sys
from pathlib import Path

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
    compared = json.loads((folder / "compare.json").read_text())
    for run in (Path(run["folder"]) for arm in compared["arms"] for run in arm["runs"]):
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        late = [step for step in steps if step["inner_step"] > 0.9 * last["inner_steps"]]
        samples = sum(step["samples"] for step in late)
        train = sum(step["loss"] * step["samples"] for step in late) / samples
        valid = last["val_loss"]
        print(f"{run.name}: training {train:.3f}, validation {valid:.3f}, gap {valid - train:+.3f}")


if __name__ == "__main__":
    code = main(["compare", *ARMS, *COMMON, "--run.folder", str(FOLDER), *sys.argv[1:]])
    if not code:
        show_gaps(FOLDER)
    sys.exit(code)
