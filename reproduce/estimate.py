"""Does the estimate of the number of communications hold? Constant batches give S_min and E_min;
from these follow the steps, syncs and samples of adaptive batches, which are then measured.

.venv/bin/python reproduce/estimate.py
    # 24 runs, three seeds of each arm

docs/plan.md derives the formulas, plan/steps_to_loss.py has them. All arms: two workers that
average every 5 steps (LocalSGD); a rate that is constant after its warm-up and goes with the square
root of the batch. A noise scale is also measured by the tests of the adaptive runs themselves: the
median of their rounds until the target. Further words are those of `adloco compare`.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from adloco.cli.main import main
from adloco.plan.steps_to_loss import fit_steps

FOLDER = Path("runs/reproduce/estimate")
EVALUATE_EVERY = {4: 16, 8: 8, 16: 4, 32: 2, 64: 1}
"""Constant batch -> rounds from one evaluation to the next."""
ETAS, EVERY, CONTEXT = (0.7, 1.0, 1.4), 5, 128
TARGETS = ("2.7", "2.6", "2.5", "2.4", "2.3")
ARMS = [
    *(
        f"constant {batch}=local-sgd@--batch.initial {batch} --evaluation.every {evaluate}"
        for batch, evaluate in EVALUATE_EVERY.items()
    ),
    *(
        f"eta {eta}=local-sgd@--batch.rule norm-test --batch.eta {eta} "
        "--batch.max_growth 2 --batch.initial 8 --batch.minimum 4 --batch.maximum 256 "
        "--evaluation.every 3"
        for eta in ETAS
    ),
]
COMMON = ["--run.tokens", "600000", "--inner.lr", "2e-3", "--method.sync_every", str(EVERY)]
COMMON += ["--learning_rate.coupling", "sqrt", "--learning_rate.shape", "constant"]
COMMON += ["--seeds", "3", "--targets", ",".join(TARGETS)]


def measured_noise_scale(run: Path, target: float) -> float:
    """Median over the rounds until the loss is reached."""
    found = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.append(row["trainers"][0]["noise_scale"])
        if (row["val_loss"] or 9.9) <= target:
            break
    return median(value for value in found if value)


def show_estimates(folder: Path) -> None:
    """Print predicted and measured steps and samples of the adaptive arms, for each target."""
    rows = list(csv.DictReader((folder / "compare.csv").open()))
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


if __name__ == "__main__":
    code = main(["compare", *ARMS, *COMMON, "--run.folder", str(FOLDER), *sys.argv[1:]])
    if not code:
        show_estimates(FOLDER)
    sys.exit(code)
