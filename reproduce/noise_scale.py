"""Is the noise scale that the batch rule sees the gradient's? Trains the recipes with a norm test,
keeps checkpoints, and measures the full gradient at each of them (`adloco gradients`).

.venv/bin/python reproduce/noise_scale.py --corpus shakespeare=FILE
    # 18 runs: three recipes, three seeds, the default corpus and FILE

Two numbers of the rule are compared with the full gradient at a checkpoint: `same` is from the
line of metrics.jsonl whose tests began with the checkpoint's parameters (that of the next round,
or with `test.step = "last"` of the same one), and `used` from the line of the checkpoint's round,
which decides the next round's batch. Checkpoints within the first tenth of the tokens do not count.
`average` is computed from the same tests as `same`: the moving average with a weight of 0.8 on the
past that the recipes had.

What was measured is kept in noise_scale.json beside this file, and not measured again.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import adloco
from adloco.lab.gradients.measuring import measure_gradients
from adloco.metrics import Record
from adloco.run.trained import load_trained

STORE = Path(__file__).with_suffix(".json")
FOLDER = Path("runs/reproduce/noise-scale")
EVERY = {"adloco": 1, "ddp-norm": 4, "adloco-paper-small": 1}
"""Recipe -> rounds from one checkpoint to the next."""
MORE = {"ddp-norm": {"run.tokens": 300_000, "inner.optimizer": "adamw"}}
"""Settings of a recipe besides its own."""
SAMPLES, BATCH, NEAR, PAST = 512, 16, 1.5, 0.8
FULL = ("noise_scale", "grad_variance", "grad_norm_sq")
SEEN = (*FULL, "noise_scale_factor", "measured_grad_variance", "measured_grad_norm_sq")

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
            **MORE.get(recipe, {}),
        }
        resume = (folder / "checkpoints").exists()
        adloco.train(resume=folder) if resume else adloco.train(recipe, **settings)
    return folder


def measured(folder: Path) -> Iterator[Row]:
    """What the rule saw at each checkpoint that counts, and the full gradient."""
    records: list[Record] = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    last = tomllib.loads((folder / "recipe.toml").read_text()).get("test", {}).get("step") == "last"
    averages: dict[tuple[int, str], list[float]] = {}
    seen: dict[tuple[int, int], Row] = {}
    for record in records:
        for row in record["trainers"]:
            means = []
            for name in ("measured_grad_variance", "measured_grad_norm_sq"):
                averages.setdefault((row["trainer"], name), []).append(row[name])
                means.append(weighted(averages[row["trainer"], name]))
            shown = {name: row[name] for name in SEEN}
            shown["average"] = means[0] / means[1]
            seen[record["round"], row["trainer"]] = shown
    for record in records:
        gone = {trainer for merge in record["merges"] for trainer in merge["absorbed"]}
        trainer = min(row["trainer"] for row in record["trainers"] if row["trainer"] not in gone)
        number = record["round"]
        kept = list(folder.glob(f"checkpoints/round-{number:06d}-*"))
        if kept and record["tokens"] >= records[-1]["tokens"] / 10:
            one = load_trained(folder, trainer, number)
            full = measure_gradients(one, SAMPLES, BATCH)["total"]
            yield {
                "round": number,
                "tokens": record["tokens"],
                "full": {name: full[name] for name in FULL},
                "used": seen[number, trainer],
                "same": seen.get((number if last else number + 1, trainer)),
            }


def weighted(values: list[float]) -> float:
    """The moving average of values, the newest last."""
    weights = [PAST**age for age in reversed(range(len(values)))]
    return fmean(values, weights)


def share(rows: list[Row], when: str, name: str = "noise_scale") -> str:
    """How often a number is near the full gradient's, and its median ratio to it."""
    pairs = [(row[when][name], row["full"]["noise_scale"]) for row in rows if row[when]]
    # Where |G|^2 of 512 samples is not above zero, the noise scale is not known: that is far.
    ratios = [seen / full if full else 0.0 for seen, full in pairs]
    near = fmean(1 / NEAR <= ratio <= NEAR for ratio in ratios)
    return f"{near:.0%}, {median(ratios):.2f}"


def show(store: dict[str, list[Row]]) -> None:
    """Print the table: by recipe, by recipe and corpus, and of all."""
    print(
        f"| within {NEAR} times, median ratio | checkpoints | same | used | average "
        "| same: within twice | within one and two stated factors |"
    )
    print("| --- " * 7 + "|")
    pairs = dict.fromkeys(key.rpartition(" ")[0] for key in store)
    for name in [*pairs, *dict.fromkeys(pair.partition(" ")[0] for pair in pairs), ""]:
        own = [
            found for key, found in store.items() if f"{key} ".startswith(f"{name} " * bool(name))
        ]
        rows = [row for found in own for row in found]
        shares = (share(rows, "same"), share(rows, "used"), share(rows, "same", "average"))
        errors = list(stated(rows))
        within = (fmean(abs(error) <= most for _, error in errors) for most in (1, 2))
        twice = fmean(abs(log) <= math.log(2) for log, _ in errors)
        print(
            f"| {name or 'all'} | {len(rows)} | {' | '.join(shares)} | {twice:.0%} "
            f"| {', '.join(f'{part:.0%}' for part in within)} |"
        )


def stated(rows: list[Row]) -> Iterator[tuple[float, float]]:
    """Logarithm of the ratio to the full gradient's, also in units of what the rule states."""
    for row in rows:
        same, full = row["same"], row["full"]["noise_scale"]
        if same and full and same["noise_scale"] and same["noise_scale_factor"]:
            log = math.log(same["noise_scale"] / full)
            yield log, log / math.log(same["noise_scale_factor"])


def as_text(store: dict[str, list[Row]]) -> str:
    """The JSON of what was measured, a checkpoint on a line."""
    runs = [
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for key, rows in store.items()
    ]
    return "{\n" + ",\n".join(runs) + "\n}\n"


def main() -> None:
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
                    print(share(store[key], "same"), flush=True)
                    STORE.write_text(as_text(store))
    show(store)


if __name__ == "__main__":
    main()
