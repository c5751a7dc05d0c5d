"""Is merging worth it? Four trainers that merge, against one trainer with all four workers, against
four that never merge; how often, how many at a time, whose parameters.

.venv/bin/python reproduce/merging.py
    # 21 runs, three seeds of each arm

Then: does a small request mean slow progress, as merging supposes? For the four trainers that never
merge, the rank correlation between a trainer's request and its validation loss is printed (negative
if those that ask for less are behind). Further words are those of `adloco compare`.
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

from adloco.cli.main import main

FOLDER = Path("runs/reproduce/merging")
RECIPE = Path(__file__).with_name("adloco.toml")
FOUR = "--method.num_trainers 4 --batch.initial 4 --batch.minimum 4"
ARMS = [
    f"every 3 rounds={RECIPE}@{FOUR}",
    f"every round={RECIPE}@{FOUR} --merge.every 1",
    f"three at a time={RECIPE}@{FOUR} --merge.count 3",
    f"survivor's parameters={RECIPE}@{FOUR} --merge.parameters survivor",
    f"momentum reset={RECIPE}@{FOUR} --merge.outer_momentum reset",
    f"never={RECIPE}@{FOUR} --merge.policy none",
    f"one trainer={RECIPE}@--method.workers_per_trainer 4 --method.num_trainers 1 "
    "--merge.policy none --batch.initial 16 --batch.minimum 16",
]
SETTINGS = ["--inner.optimizer", "adamw", "--inner.lr", "2e-3", "--wire.format", "fp32"]
COMMON = ["--batch.eta", "0.8", "--method.sync_every", "10", "--run.tokens", "250000"]
COMMON += ["--seeds", "3"]


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal ones share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Spearman's; None if all values of one side are equal."""
    left, right = ranks(one), ranks(two)
    middle = (len(one) - 1) / 2
    spread = [sum((rank - middle) ** 2 for rank in side) for side in (left, right)]
    if not all(spread):
        return None
    shared = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    return float(shared / (spread[0] * spread[1]) ** 0.5)


def requests_against_losses(folder: Path) -> None:
    """Print the mean rank correlation over the rounds of each run that never merges."""
    compared = json.loads((folder / "compare.json").read_text())
    (never,) = (arm for arm in compared["arms"] if arm["name"] == "never")
    for run in (Path(run["folder"]) for run in never["runs"]):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line)["trainers"] for line in lines]
        # A round's test sets the request of the next round, and a merge at its end goes by that.
        found = [
            rank_correlation(
                [trainer["requested_batch"] for trainer in after],
                [trainer["val_loss"] for trainer in before],
            )
            for before, after in pairwise(rows)
            if all(trainer["val_loss"] is not None for trainer in before)
        ]
        known = [value for value in found if value is not None]
        if known:
            print(
                f"{run.name}: request against loss, mean rank correlation "
                f"{mean(known):+.2f} over {len(known)} rounds with unequal requests"
            )
        else:
            print(f"{run.name}: all requests were equal in every round")


if __name__ == "__main__":
    study = [*SETTINGS, *COMMON, "--run.folder", str(FOLDER)]
    code = main(["compare", *ARMS, *study, *sys.argv[1:]])
    if not code:
        requests_against_losses(FOLDER)
    sys.exit(code)
