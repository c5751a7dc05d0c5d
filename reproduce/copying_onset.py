"""After how many tokens a small model begins to copy from its context, by method, and after how
many it predicts code that it has not seen as well without copying; and the loss it ends with.

    .venv/bin/python reproduce/copying_onset.py FOLDER [--seeds N] [--arms NAME] [--table]

Half of the text is Python's standard library, and half random words, of which each stands two to
four times in its line. A word that comes again is foretold only by copying. A run that FOLDER has
is not trained again, and one that was stopped is resumed. --arms takes those whose names begin so,
and --table trains none.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import string
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from copying import losses
from torch import Tensor

import adloco

SIGNS, WORD = string.ascii_letters + string.digits, 24
TOKENS, TEXT = 3_000_000, "texts"
HALF = 2.1
"""Loss of a word's second time in nats, half of that of a word that nothing foretells."""
PLACES, OF_CODE = 15, 1.85
"""Places of a window that have little to copy from, and a loss of them in nats."""
SETTINGS = {
    "model.hidden_size": 64,
    "model.intermediate_size": 176,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "evaluation.windows": 0,
    "evaluation.every": 10**6,
    "run.precision": "fp32",
    "run.threads": 1,
    "run.trackers": "none",
    "run.keep_checkpoints": 1000,
    "run.checkpoint_seconds": 0,
}
LONGER: dict[str, Any] = {
    "batch.initial": 16,
    "inner.lr": 1.1e-2,
    "method.sync_every": 3,
    "method.sync_growth": 1,
    "outer.lr": 1,
    "outer.options": {"momentum": 0.3, "nesterov": True},
}
ARMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 5, {}),
    "diloco": ("diloco", 10, {}),
    "diloco, four workers": ("diloco", 10, {"method.workers_per_trainer": 4}),
    "diloco, four workers, fp32": (
        "diloco",
        10,
        {"method.workers_per_trainer": 4, "wire.format": "fp32"},
    ),
    "diloco, settings for longer runs": ("diloco", 20, LONGER),
    "adloco": ("adloco", 4, {}),
}
ARMS |= {
    f"mean of four workers every {steps} steps": (
        "diloco",
        every,
        {
            "method.workers_per_trainer": 4,
            "method.sync_every": steps,
            "outer.update": "mean",
            "wire.format": "fp32",
        },
    )
    for steps, every in ((1, 100), (3, 33), (10, 10), (30, 3))
}
MEAN = "mean of four workers every 10 steps"
OFTEN = "mean of four workers every 3 steps"
FOUR = {"method.workers_per_trainer": 4}
ARMS |= {
    f"{MEAN}, twice the rate": ("diloco", 10, ARMS[MEAN][2] | {"inner.lr": 1.6e-2}),
    "mean of four workers every 6 steps": ("diloco", 20, ARMS[MEAN][2] | {"method.sync_every": 6}),
    f"{OFTEN}, growth 3": ("diloco", 33, ARMS[OFTEN][2] | {"method.sync_growth": 3}),
    f"{OFTEN}, 30 after half": ("diloco", 33, ARMS[OFTEN][2]),
    "diloco, four workers, 18 steps": ("diloco", 5, FOUR | {"method.sync_every": 18}),
    "diloco, four workers, 30 steps": ("diloco", 3, FOUR | {"method.sync_every": 30}),
    "diloco, four workers, growth 1": ("diloco", 10, FOUR | {"method.sync_growth": 1}),
    "diloco, four workers, 100 after half": ("diloco", 10, FOUR),
    "diloco, four workers, 18 steps, 300 after half": (
        "diloco",
        5,
        FOUR | {"method.sync_every": 18},
    ),
}
"""Recipe, rounds between checkpoints, and settings."""
THEN = {
    f"{OFTEN}, 30 after half": 30,
    "diloco, four workers, 100 after half": 100,
    "diloco, four workers, 18 steps, 300 after half": 300,
}
"""Steps between syncs in the second half of the tokens, where they differ."""


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    draws = random.Random(0)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines, code, drawn = [], 0, 0
        for line in file.read_text(errors="replace").splitlines():
            lines.append(line)
            code += len(line) + 1
            while drawn < code:
                word = "".join(draws.choice(SIGNS) for _ in range(draws.randint(12, 32)))
                lines.append("# " + " ".join([word] * draws.randint(2, 4)))
                drawn += len(lines[-1]) + 1
        (folder / f"{file.stem}.txt").write_text("\n".join(lines) + "\n")


def new_lines() -> tuple[Tensor, int]:
    """Lines [line, sign] with a random word four times, and the place of its second time."""
    draws, begin = random.Random(7), "    return x\n# "
    words = ["".join(draws.choice(SIGNS) for _ in range(WORD)) for _ in range(256)]
    lines = [[*(begin + " ".join([word] * 4)).encode()] for word in words]
    return torch.tensor(lines), len(begin) + WORD + 1


def new_code() -> Tensor:
    """Windows [window, sign] of the library's packages, which nobody trains on."""
    files = sorted((Path(sysconfig.get_path("stdlib")) / "asyncio").glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    width = PLACES + 1
    return torch.tensor(list(text[: len(text) // width * width])).view(-1, width)[::8]


def measured(folder: Path) -> tuple[float, float, float]:
    """Millions of tokens after which the loss of a word's second time is `HALF`, and that of new
    code `OF_CODE`, each on the line between two checkpoints; and the run's validation loss.
    """
    (lines, begin), code = new_lines(), new_code()
    records = (folder / "metrics.jsonl").read_text().splitlines()
    tokens = {0: 0} | {each["round"]: each["tokens"] for each in map(json.loads, records)}
    of_words, of_code = [], []
    for checkpoint in sorted((folder / "checkpoints").glob("round-*")):
        number = int(checkpoint.name.split("-")[1])
        model = adloco.load(folder, round=number).model.eval()
        # Without the first two signs, which nothing foretells.
        word = float(losses(model, lines)[begin + 1 : begin + WORD - 1].mean())
        of_words.append((tokens[number] / 1e6, word))
        of_code.append((tokens[number] / 1e6, float(losses(model, code).mean())))
        if word < HALF and of_code[-1][1] < OF_CODE:
            break
    final = json.loads((folder / "summary.json").read_text())["final_val_loss"]
    return reached(of_words, HALF), reached(of_code, OF_CODE), final


def reached(points: Sequence[tuple[float, float]], level: float) -> float:
    """Tokens at which the loss of points (tokens, loss) falls below a level; NaN: never."""
    for (before, above), (now, loss) in itertools.pairwise([(0.0, float("inf")), *points]):
        if loss < level:
            share = (above - level) / (above - loss) if math.isfinite(above) else 1.0
            return before + share * (now - before)
    return math.nan


def complete(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["tokens"] >= TOKENS


def train(arm: str, seed: int, folder: Path, texts: Path) -> None:
    """Train a run, or the rest of it."""
    recipe, every, settings = ARMS[arm]
    given: dict[str, Any] = SETTINGS | settings | {"run.checkpoint_every": every, "run.seed": seed}
    first = TOKENS
    if arm in THEN:
        first, given["learning_rate.total_tokens"] = TOKENS // 2, TOKENS
    if not (folder / "recipe.toml").exists():
        adloco.train(recipe, tokens=first, data=texts, folder=folder, **given)
    elif not (folder / "summary.json").exists():
        adloco.train(resume=folder)
    if arm in THEN and not complete(folder):
        then: dict[str, Any] = {"method.sync_every": THEN[arm]}
        adloco.train(resume=folder, tokens=TOKENS, **then)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", default="")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    texts = options.folder / TEXT
    if not texts.exists():
        write_texts(texts)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed, arm in itertools.product(range(options.seeds), ARMS):
        folder = options.folder / f"{arm}-{seed}"
        if not arm.startswith(options.arms):
            continue
        if not options.table and not complete(folder):
            train(arm, seed, folder, texts)
        if complete(folder):
            found.setdefault(arm, []).append(measured(folder))
    names = "begins to copy after millions of tokens", "code", "validation loss"
    for arm, runs in found.items():
        for name, each in zip(names, zip(*runs, strict=True), strict=True):
            values = ", ".join(f"{value:.3f}" for value in each)
            print(f"{arm}: {name} {statistics.mean(each):.3f} ({values})")


if __name__ == "__main__":
    main()
