"""Two islands that own their texts, C and English, against one pool of both, and each alone.

    .venv/bin/python reproduce/islands.py [--tokens 600k] [--seeds 3]

Runs that are missing in runs/reproduce/islands are trained, with the recipe diloco, 0.13M
parameters and H = 10, and islands.csv beside this file gets a row for each. The C text is the
headers that torch brings, the English one input.txt of github.com/karpathy/char-rnn; both are cut
to a million characters, of which the last twentieth is held out. An island alone trains half as
many tokens, with one worker of the same batch: what it would have without the other.
"""

import argparse
import csv
import math
import statistics
from pathlib import Path
from typing import Any

import torch

import adloco

FOLDER = Path("runs/reproduce/islands")
ENGLISH = Path("../shared/data/tinyshakespeare/input.txt")
CHARACTERS, HELD_OUT = 1_000_000, 0.05
TEXTS = ("c", "english")
SHARED = {
    **{"model.hidden_size": 64, "model.intermediate_size": 176, "model.num_layers": 2},
    **{"data.context_tokens": 64, "method.sync_every": 10, "wire.format": "fp32"},
    "run.trackers": "none",
}
"""0.13M parameters, the small model of benchmarks/."""
ALONE = {"method.workers_per_trainer": 1, "batch.initial": 4, "batch.minimum": 4}


def texts(folder: Path) -> None:
    """Write NAME/text.txt to train on and NAME-held-out/text.txt to validate on."""
    headers = sorted((Path(torch.__file__).parent / "include").rglob("*.h"))
    # Every seventh one: neighbours are alike.
    c = "\n".join(header.read_text(errors="replace") for header in headers[::7])
    for name, text in zip(TEXTS, (c, ENGLISH.read_text()), strict=True):
        cut = int(CHARACTERS * (1 - HELD_OUT))
        for part, own in (("", text[:cut]), ("-held-out", text[cut:CHARACTERS])):
            path = folder / f"{name}{part}" / "text.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(own)
    both = folder / "both"
    both.mkdir(exist_ok=True)
    for name in TEXTS:
        (both / f"{name}.txt").write_text((folder / name / "text.txt").read_text())


def arms(folder: Path, tokens: int) -> dict[str, dict[str, Any]]:
    """The settings of each arm."""
    islands = {name: {"path": str(folder / name)} for name in TEXTS}
    return {
        "islands": {"data.islands": islands, "run.tokens": tokens},
        "one pool": {"data.path": str(folder / "both"), "run.tokens": tokens},
        **{
            f"{name} alone": {"data.path": str(folder / name), "run.tokens": tokens // 2} | ALONE
            for name in TEXTS
        },
    }


def trained(arm: str, settings: dict[str, Any], seed: int) -> dict[str, float]:
    """Train a run, or read it, and return its loss on each held-out text."""
    folder = FOLDER / f"{arm.replace(' ', '-')}-{seed}"
    if (folder / "summary.json").exists():
        run = adloco.load(folder)
    elif folder.exists():
        run = adloco.train(resume=folder)
    else:
        own = {"run.folder": str(folder), "run.seed": seed}
        run = adloco.train("diloco", **SHARED | own | settings)
    return {
        name: run.evaluate(data=FOLDER / "texts" / f"{name}-held-out", windows=0)["loss"]
        for name in TEXTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    texts(FOLDER / "texts")
    rows = [
        {"arm": arm, "seed": seed, "tokens": settings["run.tokens"]} | trained(arm, settings, seed)
        for seed in range(options.seeds)
        for arm, settings in arms(FOLDER / "texts", options.tokens).items()
    ]
    with Path(__file__).with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for name in TEXTS:
            losses = [float(row[name]) for row in rows if row["arm"] == arm]
            spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
            cells.append(f"{name} {statistics.mean(losses):.4f} (sd {spread:.4f})")
        print(f"{arm:<14} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
