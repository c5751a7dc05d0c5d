"""What `compare.py` prints after its comparisons, from the folders of their runs."""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import correlation, fmean, median
from typing import Any

from steps_to_loss import fit_steps

from adloco import BatchController, BatchGuards
from adloco.cli.main import main
from adloco.lab.batch_controls.batch_rules import RandomBatch
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.study.statistics import first_crossing

TOKENS, CONTEXT, STEPS, FIRST, LARGEST, SEEDS = 600_000, 128, 20, 8, 200, 3
COUPLED = "--learning_rate.coupling sqrt"
NORM_TEST = (
    "--batch.rule norm-test --batch.eta 0.5 --batch.max_growth 2 --batch.minimum 8 "
    "--batch.maximum 64"
)
EVALUATE_EVERY = {4: 16, 8: 8, 16: 4, 32: 2, 64: 1}
"""Constant batch -> rounds from one evaluation to the next."""
ETAS, EVERY, LEVELS = (0.7, 1.0, 1.4), 5, (2.6, 1.7)
TARGETS = ("2.7", "2.6", "2.5", "2.4", "2.3")


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of records."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def runs(folder: Path, arm: str = "") -> Iterator[Path]:
    """The folders of a comparison's runs; of one arm, if it is named."""
    for each in json.loads((folder / "compare.json").read_text())["arms"]:
        if arm in ("", each["name"]):
            yield from (Path(run["folder"]) for run in each["runs"])


def compared(folder: Path) -> list[dict[str, str]]:
    """The rows of a comparison."""
    with (folder / "compare.csv").open(newline="") as opened:
        return list(csv.DictReader(opened))


def keep_rows(folder: Path, file: Path) -> None:
    """Copy the rows of a comparison to a file, without the runs' folders."""
    rows = compared(folder)
    names = [name for name in rows[0] if name != "folder"]
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def losses(run: Path) -> tuple[list[float], list[float | None]]:
    """Training and validation loss at the end of each round."""
    rounds, steps = lines(run / "metrics.jsonl"), lines(run / "steps.jsonl")
    train = []
    for row in rounds:
        last = [step for step in steps if 0 <= row["inner_steps"] - step["inner_step"] < 10]
        samples = sum(step["samples"] for step in last)
        train.append(sum(step["loss"] * step["samples"] for step in last) / samples)
    return train, [row["val_loss"] for row in rounds]


def show_gaps(folder: Path, words: Sequence[str]) -> None:
    """Print the gap between training and validation loss at each run's end. Runs with few steps are
    simply less far, so the validation loss is printed too where the training loss (mean over the
    samples of the last ten inner steps of a round) had come down to two levels.
    """
    for run in runs(folder):
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


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal ones share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Spearman's; None if all values of one side are equal."""
    if len({*one}) == 1 or len({*two}) == 1:
        return None
    return correlation(ranks(one), ranks(two))


def requests_against_losses(folder: Path, words: Sequence[str]) -> None:
    """Does a small request mean slow progress, as merging supposes? Print the mean rank correlation
    between a trainer's request and its validation loss over the rounds of each run that never
    merges (negative if those that ask for less are behind).
    """
    for run in runs(folder, "never"):
        rows = [row["trainers"] for row in lines(run / "metrics.jsonl")]
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
                f"{fmean(known):+.2f} over {len(known)} rounds with unequal requests"
            )
        else:
            print(f"{run.name}: all requests were equal in every round")


def measured_mean(folder: Path) -> float:
    """Samples per inner step, over all seeds of the norm test."""
    rows = [lines(file)[-1] for file in folder.glob("runs/norm-test-seed-*/metrics.jsonl")]
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


def compare_controls(folder: Path, words: Sequence[str]) -> int:
    """Compare the norm test with batches of its mean, and with those of its first seed; return the
    exit code.
    """
    mean, samples = measured_mean(folder), TOKENS // CONTEXT
    (first,) = folder.glob("runs/norm-test-seed-0-*")
    ramp = nearest(
        lambda last: RampBatch(first=FIRST, last=last, over_samples=samples, ramp="linear"), mean
    )
    highest = nearest(lambda number: RandomBatch(lowest=FIRST, highest=number), mean)
    rules = {
        "norm test": NORM_TEST,
        "replay": f"--batch.rule replay --batch.replayed_run {first}",
        "ramp": f"--batch.rule ramp --batch.first {FIRST} --batch.last {ramp} "
        f"--batch.over_samples {samples} --batch.ramp linear",
        "random": f"--batch.rule random --batch.lowest {FIRST} --batch.highest {highest}",
        f"constant {mean:.0f}": f"--batch.initial {mean:.0f}",
        "seesaw": "--batch.rule seesaw",
        f"constant {FIRST}": "",
    }
    arms = (f"{name}=local-sgd@{COUPLED} {rule}" for name, rule in rules.items())
    return main(["compare", *arms, *words])


def measured_noise_scale(run: Path, target: float) -> float:
    """Median over the rounds until the loss is reached."""
    found = []
    for row in lines(run / "metrics.jsonl"):
        found.append(row["trainers"][0]["noise_scale"])
        if (row["val_loss"] or 9.9) <= target:
            break
    return median(value for value in found if value)


def show_estimates(folder: Path, words: Sequence[str]) -> None:
    """Print predicted and measured steps and samples of the adaptive arms, for each target."""
    rows = compared(folder)
    for target in TARGETS:
        needed = defaultdict[str, list[tuple[float, float, Path]]](list)
        for row in rows:
            if row[f"inner_steps_to_{target}"]:
                steps = float(row[f"inner_steps_to_{target}"])
                samples = float(row[f"tokens_to_{target}"]) / CONTEXT
                needed[row["arm"]].append((steps, samples, Path(row["folder"])))
        constant = [
            (batch, steps)
            for batch in EVALUATE_EVERY
            for steps, _, _ in needed[f"constant {batch}"]
        ]
        if len({batch for batch, _ in constant}) < 3:
            print(f"loss {target}: reached with fewer than three constant batches")
            continue
        law = fit_steps([batch for batch, _ in constant], [steps for _, steps in constant])
        errors = [abs(law.steps(batch) / steps - 1) for batch, steps in constant]
        print(
            f"loss {target}: S_min {law.min_steps:.0f} steps, E_min {law.min_samples:.0f} samples, "
            f"B {law.noise_scale:.1f}; constant batches off by {median(errors):.0%} (median), "
            f"{max(errors):.0%} (worst of {len(errors)})"
        )
        for eta in ETAS:
            if found := needed[f"eta {eta}"]:
                steps, samples = fmean(one[0] for one in found), fmean(one[1] for one in found)
                scale = fmean(measured_noise_scale(one[2], float(target)) for one in found)
                print(
                    f"  eta {eta}: syncs {law.adaptive_steps(eta) / EVERY:.0f} predicted, "
                    f"{steps / EVERY:.0f} measured ({law.adaptive_steps(eta) / steps - 1:+.0%}); "
                    f"samples {law.adaptive_samples(eta):.0f} predicted, {samples:.0f} measured "
                    f"({law.adaptive_samples(eta) / samples - 1:+.0%}); mean batch "
                    f"{samples / steps:.1f}; measured noise scale {scale:.1f}"
                )
