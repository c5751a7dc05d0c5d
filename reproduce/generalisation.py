"""Do large batches generalise worse? A small text (312k tokens) read twice, with small, large and
adaptive batches.

.venv/bin/python reproduce/generalisation.py
    # 9 runs, three seeds of each arm

At the end the gap between training and validation loss is printed. Runs with few steps are simply
less far, so the validation loss is printed too where the training loss (mean over the samples of
the last ten inner steps of a round) had come down to two levels. Further words are those of
`adloco compare`.
"""

import json
import sys
from pathlib import Path

from adloco.cli.main import main
from adloco.study.statistics import first_crossing

FOLDER = Path("runs/reproduce/generalisation")
ARMS = [
    "constant 8=local-sgd",
    "constant 64=local-sgd@--batch.initial 64",
    "adaptive=local-sgd@--batch.rule norm-test --batch.eta 0.5 "
    "--batch.max_growth 2 --batch.minimum 8 --batch.maximum 64",
]
LEVELS = (2.6, 1.7)
COMMON = ["--run.tokens", "600000", "--inner.lr", "2e-3", "--seeds", "3", "--data.samples", "12"]


def losses(run: Path) -> tuple[list[float], list[float | None]]:
    """Training and validation loss at the end of each round."""
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    train = []
    for row in rounds:
        last = [step for step in steps if 0 <= row["inner_steps"] - step["inner_step"] < 10]
        samples = sum(step["samples"] for step in last)
        train.append(sum(step["loss"] * step["samples"] for step in last) / samples)
    return train, [row["val_loss"] for row in rounds]


def show_gaps(folder: Path) -> None:
    """Print each run's final gap, and its validation loss at the levels of training loss."""
    compared = json.loads((folder / "compare.json").read_text())
    for run in (Path(run["folder"]) for arm in compared["arms"] for run in arm["runs"]):
        train, valid = losses(run)
        known = [(t, v) for t, v in zip(train, valid, strict=True) if v is not None]
        reached = [
            first_crossing([v for _, v in known], [t for t, _ in known], level) for level in LEVELS
        ]
        print(
            f"{run.name}: gap at the end {known[-1][1] - known[-1][0]:+.3f}; validation loss at "
            + ", ".join(
                f"training loss {level}: {'-' if found is None else f'{found:.3f}'}"
                for level, found in zip(LEVELS, reached, strict=True)
            )
        )


if __name__ == "__main__":
    code = main(["compare", *ARMS, *COMMON, "--run.folder", str(FOLDER), *sys.argv[1:]])
    if not code:
        show_gaps(FOLDER)
    sys.exit(code)
