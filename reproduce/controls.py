"""Must the batch follow the gradient? The norm test against batches of the same mean size that do
not look at it, and against Seesaw (arXiv 2510.14717).

.venv/bin/python reproduce/controls.py
    # an adaptive run first, then 21 runs, three seeds of each arm

The adaptive run's batches are replayed, and its mean batch sets that of the arms `constant`,
`random`, `cyclic` and `ramp`. All arms: two workers that average every 20 steps (LocalSGD). Further
words are those of `adloco compare`.
"""

import json
import sys
from pathlib import Path

from adloco.cli.main import main

FOLDER = Path("runs/reproduce/controls")
FIRST = FOLDER / "adaptive"
TOKENS = ["--run.tokens", "600000"]
COMMON = [*TOKENS, "--inner.lr", "2e-3", "--batch.maximum", "64", "--seeds", "3"]
NORM_TEST = (
    "--batch.rule norm-test --batch.eta 0.5 --batch.smoothing 0.8 --batch.max_growth 2 "
    "--batch.minimum 8"
)


def mean_batch(run: Path) -> int:
    """Samples per inner step of a run with one trainer, on average."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recipe_tokens = rows[0]["tokens"] / (rows[0]["trainers"][0]["trainer_batch"] * 20)
    return round(rows[-1]["tokens"] / rows[-1]["inner_steps"] / recipe_tokens)


def arms(mean: int) -> list[str]:
    """The arms, with batches of this mean size."""
    rising = 2 * mean - 8
    return [
        f"norm test=local-sgd@{NORM_TEST}",
        f"replay=local-sgd@--batch.rule replay --batch.replayed_run {FIRST}",
        f"ramp=local-sgd@--batch.rule ramp --batch.first 8 --batch.last {rising} "
        "--batch.over_samples 4700 --batch.ramp linear",
        f"random=local-sgd@--batch.rule random --batch.lowest 8 --batch.highest {rising}",
        f"cyclic=local-sgd@--batch.rule cyclic --batch.cycle '[8, {rising}]' "
        "--batch.each_samples 400",
        f"constant {mean}=local-sgd@--batch.initial {mean}",
        "seesaw=local-sgd@--batch.rule seesaw --learning_rate.coupling sqrt",
        "constant 8=local-sgd",
    ]


if __name__ == "__main__":
    if not (FIRST / "summary.json").exists():
        words = [*NORM_TEST.split(), *COMMON[:-2], "--run.folder", str(FIRST)]
        if code := main(["train", "local-sgd", *words]):
            sys.exit(code)
    study = [*COMMON, "--run.folder", str(FOLDER / "study")]
    sys.exit(main(["compare", *arms(mean_batch(FIRST)), *study, *sys.argv[1:]]))
