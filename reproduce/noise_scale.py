"""Is the noise scale that the batch rule sees the gradient's? Trains the recipes with a norm test,
keeps checkpoints, and measures the full gradient at each of them (`adloco gradients`).

.venv/bin/python reproduce/noise_scale.py --corpus shakespeare=FILE
    # 18 runs: three recipes, three seeds, the default corpus and FILE

The rule's number at a checkpoint is the one in its round's line of metrics.jsonl: the one that
decides the next round's batch. Checkpoints within the first tenth of the tokens do not count.
`previous average` is computed from the same runs' raw tests, one step's worth a round less noisy
than it was: the moving average with a weight of 0.8 on the past that the recipes had.

What was measured is kept in noise_scale.json beside this file, and not measured again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import adloco
from adloco.metrics import Record
from adloco.run.trained import load_trained
from adloco.run.trained_gradients import measure_gradients

STORE = Path(__file__).with_suffix(".json")
FOLDER = Path("runs/reproduce/noise-scale")
EVERY = {"adloco": 1, "ddp-norm": 4, "adloco-paper-small": 1}
"""Recipe -> rounds from one checkpoint to the next."""
TOKENS = {"ddp-norm": 300_000}
SAMPLES, BATCH, NEAR, PAST = 512, 16, 1.5, 0.8

Row = dict[str, Any]


def trained(recipe: str, corpus: str, path: str, seed: int) -> Path:
    """The folder of a finished run, which is trained if it is not there."""
    folder = FOLDER / f"{recipe}-{corpus}-{seed}"
    if not (folder / "summary.json").exists():
        settings = {
            "run.folder": str(folder),
            "run.seed": seed,
            "run.trackers": "none",
            "run.checkpoint_every": EVERY[recipe],
            "run.keep_checkpoints": 10**6,
            **({"data.path": path} if path else {}),
            **({"run.tokens": TOKENS[recipe]} if recipe in TOKENS else {}),
        }
        resume = (folder / "checkpoints").exists()
        adloco.train(resume=folder) if resume else adloco.train(recipe, **settings)
    return folder


def measured(folder: Path) -> Iterator[Row]:
    """What the rule saw at each checkpoint that counts, and the full gradient."""
    records: list[Record] = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    average: dict[str, float] = {}
    weight = 0.0
    for record in records:
        survivors = {row["trainer"] for row in record["trainers"]}
        survivors -= {gone for merge in record["merges"] for gone in merge["absorbed"]}
        row = next(row for row in record["trainers"] if row["trainer"] == min(survivors))
        weight = PAST * weight + 1
        for name in ("measured_grad_variance", "measured_grad_norm_sq"):
            average[name] = PAST * average.get(name, 0.0) + row[name]
        kept = list(folder.glob(f"checkpoints/round-{record['round']:06d}-*"))
        if not kept or record["tokens"] < records[-1]["tokens"] / 10:
            continue
        one = load_trained(folder, row["trainer"], record["round"])
        full = measure_gradients(one, SAMPLES, BATCH)["total"]
        yield {
            "round": record["round"],
            "tokens": record["tokens"],
            "rule": row["noise_scale"],
            "factor": row["noise_scale_factor"],
            "requested": row["requested_batch"],
            "average": average["measured_grad_variance"] / average["measured_grad_norm_sq"],
            "full": full["noise_scale"],
            "grad_variance": [row["grad_variance"], full["grad_variance"]],
            "grad_norm_sq": [row["grad_norm_sq"], full["grad_norm_sq"]],
        }


def share(rows: list[Row], name: str) -> str:
    """How often a number is near the full gradient's, and its median ratio to it."""
    # Where |G|^2 of 512 samples is not above zero, the noise scale is not known and counts as far.
    ratios = [row[name] / row["full"] if row["full"] else 0.0 for row in rows]
    near = fmean(1 / NEAR <= ratio <= NEAR for ratio in ratios)
    return f"{near:.0%}, {median(ratios):.2f}"


def show(store: dict[str, list[Row]]) -> None:
    print(f"| run | checkpoints | within {NEAR} times, median ratio | previous average |")
    print("| --- | --- | --- | --- |")
    for recipe in [*EVERY, ""]:
        rows = [
            row
            for key, found in store.items()
            if key.startswith(f"{recipe} ") or not recipe
            for row in found
        ]
        if rows:
            name = recipe or "all"
            print(f"| {name} | {len(rows)} | {share(rows, 'rule')} | {share(rows, 'average')} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpus", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--recipes", default=",".join(EVERY))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    store: dict[str, list[Row]] = json.loads(STORE.read_text()) if STORE.exists() else {}
    corpora = {"default": ""} | dict(each.split("=", 1) for each in arguments.corpus)
    for seed in range(arguments.seeds):
        for corpus, path in corpora.items():
            for recipe in arguments.recipes.split(","):
                key = f"{recipe} {corpus} {seed}"
                if key not in store:
                    print(key, flush=True)
                    store[key] = list(measured(trained(recipe, corpus, path, seed)))
                    rows = ",\n  ".join(json.dumps(row) for row in store[key])
                    print(f"  {share(store[key], 'rule')}\n  {rows}", flush=True)
                    STORE.write_text(json.dumps(store, indent=1) + "\n")
    show(store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
