"""Must the batch follow the gradient? The norm test against batches of the same mean size that do
not look at it, and against Seesaw (arXiv 2510.14717).

.venv/bin/python reproduce/controls.py
    # an adaptive run first, then 21 runs, three seeds of each arm

The adaptive run's batches are replayed, and its mean batch sets that of the arms `constant`,
`random` and `ramp`. All arms: two workers that average every 20 steps (LocalSGD). Further
words are those of `adloco compare`.
"""

import json
import math
import sys
import tomllib
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


def samples_and_steps(run: Path) -> tuple[int, int]:
    """Samples and inner steps of a whole run."""
    context = tomllib.loads((run / "recipe.toml").read_text())["data"]["context_tokens"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last["tokens"] // context, last["inner_steps"]


def ramp_end(mean: float, first: int = 8) -> int:
    """Where a linear ramp must end to have this mean over inner steps. A batch that rises linearly
    over the samples takes ln(last / first) / (last - first) steps for each of them.
    """
    return min(
        range(first + 1, 100 * first),
        key=lambda last: abs((last - first) / math.log(last / first) - mean),
    )


def arms(samples: int, steps: int) -> list[str]:
    """The arms, with the mean batch of a run of so many samples and inner steps."""
    mean = round(samples / steps)
    return [
        f"norm test=local-sgd@{NORM_TEST}",
        f"replay=local-sgd@--batch.rule replay --batch.replayed_run {FIRST}",
        f"ramp=local-sgd@--batch.rule ramp --batch.first 8 --batch.last {ramp_end(mean)} "
        f"--batch.over_samples {samples} --batch.ramp linear",
        f"random=local-sgd@--batch.rule random --batch.lowest 8 --batch.highest {2 * mean - 8}",
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
    sys.exit(main(["compare", *arms(*samples_and_steps(FIRST)), *study, *sys.argv[1:]]))
