"""Must the batch follow the gradient? The norm test against batches of the same mean size that do
not look at it, and against Seesaw (arXiv 2510.14717).

.venv/bin/python reproduce/controls.py
    # 21 runs, three seeds of each arm; those of the norm test come first

The norm test's runs set the mean batch of the arms `constant`, `random` and `ramp`, and the batches
of its first seed are replayed. All arms: two workers that average every 20 steps (LocalSGD), and a
rate that grows with the square root of the batch, as Seesaw has it. Further words are those of
`adloco compare`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from adloco import BatchController, BatchGuards
from adloco.cli.main import main
from adloco.lab.batch_controls.batch_rules import RandomBatch
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.ramp import RampBatch

FOLDER = Path("runs/reproduce/controls")
TOKENS, CONTEXT, STEPS, FIRST, LARGEST, SEEDS = 600_000, 128, 20, 8, 200, 3
COMMON = ["--run.tokens", str(TOKENS), "--inner.lr", "2e-3", "--batch.maximum", str(LARGEST)]
COMMON += ["--seeds", str(SEEDS), "--run.folder", str(FOLDER)]
COUPLED = "--learning_rate.coupling sqrt"
NORM_TEST = (
    f"norm test=local-sgd@{COUPLED} --batch.rule norm-test --batch.eta 0.5 "
    "--batch.max_growth 2 --batch.minimum 8 --batch.maximum 64"
)


def measured_mean(folder: Path) -> float:
    """Samples per inner step, over all seeds of the norm test."""
    rows = [
        json.loads(file.read_text().splitlines()[-1])
        for file in folder.glob("runs/norm-test-seed-*/metrics.jsonl")
    ]
    return float(sum(row["samples"] for row in rows) / sum(row["inner_steps"] for row in rows))


def trained_mean(rule: BatchRule) -> float:
    """Samples per inner step of runs with this rule, whose batch changes after each round, over all
    seeds.
    """
    all_samples = all_steps = 0
    for seed in range(SEEDS):
        controller = BatchController(rule, BatchGuards(initial=FIRST, maximum=LARGEST), seed)
        samples = 0
        while samples < (end := TOKENS // CONTEXT):
            steps = min(STEPS, -(-(end - samples) // controller.requested_batch))
            samples += steps * controller.requested_batch
            all_steps += steps
            controller.update(None, samples)
        all_samples += samples
    return all_samples / all_steps


def nearest(rule: Callable[[int], BatchRule], mean: float) -> int:
    """The number for which a rule's batches have this mean."""
    return min(range(FIRST + 1, LARGEST), key=lambda number: abs(trained_mean(rule(number)) - mean))


def arms(mean: float, replayed: Path) -> list[str]:
    """The arms besides the norm test, with batches of this mean."""
    samples = TOKENS // CONTEXT
    ramp = nearest(
        lambda last: RampBatch(first=FIRST, last=last, over_samples=samples, ramp="linear"), mean
    )
    highest = nearest(lambda number: RandomBatch(lowest=FIRST, highest=number), mean)
    return [
        f"replay=local-sgd@{COUPLED} --batch.rule replay --batch.replayed_run {replayed}",
        f"ramp=local-sgd@{COUPLED} --batch.rule ramp --batch.first {FIRST} --batch.last {ramp} "
        f"--batch.over_samples {samples} --batch.ramp linear",
        f"random=local-sgd@{COUPLED} --batch.rule random --batch.lowest {FIRST} "
        f"--batch.highest {highest}",
        f"constant {mean:.0f}=local-sgd@{COUPLED} --batch.initial {mean:.0f}",
        f"seesaw=local-sgd@{COUPLED} --batch.rule seesaw",
        f"constant {FIRST}=local-sgd@{COUPLED}",
    ]


if __name__ == "__main__":
    words = [*COMMON, *sys.argv[1:]]
    if code := main(["compare", NORM_TEST, *words]):
        sys.exit(code)
    (first,) = FOLDER.glob("runs/norm-test-seed-0-*")
    sys.exit(main(["compare", NORM_TEST, *arms(measured_mean(FOLDER), first), *words]))
