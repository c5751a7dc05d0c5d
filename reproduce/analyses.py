"""What `compare.py` prints after its comparisons, from the folders of their runs."""

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from steps_to_loss import fit_steps

TOKENS, CONTEXT = 600_000, 128
COUPLED = "--learning_rate.coupling sqrt"
EVALUATE_EVERY = {4: 16, 8: 8, 16: 4, 32: 2, 64: 1}
"""Constant batch -> rounds from one evaluation to the next."""
ETAS, EVERY = (0.7, 1.0, 1.4), 5
TARGETS = ("2.7", "2.6", "2.5", "2.4", "2.3")


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of records."""
    return [json.loads(line) for line in file.read_text().splitlines()]


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


def measured_noise_scale(run: Path, target: float) -> float:
    """Median over the rounds until the loss is reached."""
    found: list[float | None] = []
    for row in lines(run / "metrics.jsonl"):
        found.append(row["trainers"][0]["noise_scale"])
        if (row["val_loss"] or 9.9) <= target:
            break
    return median(value for value in found if value)


def show_estimates(folder: Path) -> None:
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
