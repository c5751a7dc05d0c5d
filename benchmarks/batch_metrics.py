"""Compares rules for the batch at equal tokens: the loss, and the inner steps that it took.

    .venv/bin/python benchmarks/batch_metrics.py --jobs 2    # trains what is not stored
    .venv/bin/python benchmarks/batch_metrics.py --table     # trains nothing

The page (batch_metrics.md) has the problem and the arms. Norm tests take four test steps a round;
those of its first runs smoothed by a moving average.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from frontier import Trial
from stored_runs import (
    Result,
    Spec,
    Store,
    Trainer,
    in_processes,
    spread,
    stored,
    study_parser,
    table,
    write_page,
)

from adloco import BatchController, BatchGuards
from adloco.errors import require
from adloco.metrics import Record
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.run.training_run import TrainingRun

TOKENS, CONTEXT, SEEDS = 3_000_000, 64, (0, 1, 2)
SMALL, LARGEST, LR, STEPS = 16, 256, 8e-3, 10
GROWING = (
    f"batch.initial={SMALL} batch.minimum={SMALL} batch.maximum={LARGEST} "
    f"switch.max_micro_batch={LARGEST} learning_rate.coupling=sqrt "
    f"learning_rate.reference_batch={SMALL}"
)


def constant(batch: int) -> Trial:
    return Trial(arm="ddp", batch=batch, lr=LR * (batch / SMALL) ** 0.5, sync_every=STEPS)


def growing(rule: str) -> Trial:
    return Trial(arm="ddp", lr=LR, sync_every=STEPS, more=f"{GROWING} {rule}")


def norm_test(metric: str, eta: float) -> Trial:
    guards = "batch.max_growth=2 test.groups=8"
    return growing(f"batch.rule=norm-test batch.metric={metric} batch.eta={eta} {guards}")


MUON = {f"muon, eta {eta:g}": norm_test("muon", eta) for eta in (1.5, 2.0, 3.0)}
ARMS = {
    **{f"constant {batch}": constant(batch) for batch in (SMALL, 32, 64, 128)},
    **{f"euclidean, eta {eta:g}": norm_test("euclidean", eta) for eta in (1.5, 2.0, 3.0)},
    **MUON,
    "seesaw": growing("batch.rule=seesaw"),
}
"""The arms that need no others' results."""


class Batches:
    """Keeps the batch and the noise scale of each round."""

    def __init__(self) -> None:
        self._rounds: list[tuple[int, int, float | None]] = []

    def __call__(self, run: TrainingRun, record: Record) -> Result:
        """Called after each round; returns what is added to the run's result."""
        (row,) = record["trainers"]
        self._rounds.append((record["tokens"], row["trainer_batch"], row["noise_scale"]))
        return {"rounds": self._rounds}


def specs_of(trial: Trial, tokens: int) -> list[Spec]:
    """The runs of an arm, one for each seed."""
    return [replace(trial.spec(seed), tokens=tokens) for seed in SEEDS]


def ramps(runs: Mapping[Spec, Result], tokens: int) -> dict[str, Trial]:
    """The ramps that are matched with arms of which all runs are stored."""
    found = {}
    for name, trial in MUON.items():
        own = [runs[spec] for spec in specs_of(trial, tokens) if spec in runs]
        if len(own) == len(SEEDS) and not any(run["diverged"] for run in own):
            samples = tokens // CONTEXT
            last = matched(statistics.fmean(steps(run) for run in own), samples)
            rule = f"batch.rule=ramp batch.first={SMALL} batch.last={last}"
            found[f"ramp to {last}, as {name}"] = growing(f"{rule} batch.over_samples={samples}")
    return found


def matched(wanted_steps: float, samples: int) -> int:
    """The last batch of a ramp that takes about so many inner steps for these samples."""

    def taken(last: int) -> int:
        rule = RampBatch(first=SMALL, last=last, over_samples=samples)
        controller = BatchController(rule, BatchGuards(initial=SMALL, maximum=LARGEST))
        seen = count = 0
        while seen < samples:
            more = min(STEPS, -(-(samples - seen) // controller.requested_batch))
            seen, count = seen + more * controller.requested_batch, count + more
            controller.update(None, seen)
        return count

    return min(range(SMALL, LARGEST + 1), key=lambda last: abs(taken(last) - wanted_steps))


def steps(run: Result) -> int:
    """Inner steps of a run."""
    return int(run["curve"]["syncs"][-1])  # Of data-parallel training, a sync is an inner step.


def work(options: argparse.Namespace, deadline: float) -> None:
    """Train what nobody has stored or begun: first the arms, then the ramps that they determine."""
    finish = Trainer(store=Store(options.json), deadline=deadline, watch=Batches)

    def trained(arms: Mapping[str, Trial]) -> dict[Spec, Result]:
        by_arm = [specs_of(trial, options.tokens) for trial in arms.values()]
        specs = [spec for of_seed in zip(*by_arm, strict=True) for spec in of_seed]
        return dict(zip(specs, finish(specs), strict=True))

    trained(ramps(trained(ARMS), options.tokens))


def comparison(arms: Mapping[str, Sequence[Spec]], runs: Mapping[Spec, Result]) -> str:
    """A row for each arm with stored runs, against those of the small batch.

    Args:
        arms: By name, the runs of each arm, a seed after the other.
        runs: Those that are stored.
    """
    small = [runs.get(spec) for spec in arms[f"constant {SMALL}"]]
    heads = ["arm", "seeds", "inner steps", "fewer", "mean batch", "last batch", "loss"]
    rows = []
    for name, own in arms.items():
        found = [(runs[one], base) for one, base in zip(own, small, strict=True) if one in runs]
        good = [(run, base) for run, base in found if not run["diverged"]]
        diverged = f" ({len(found) - len(good)} diverged)" if len(good) < len(found) else ""
        if not good:
            rows += [[name, f"0{diverged}", *["-"] * 6]] if found else []
            continue
        taken = statistics.fmean(steps(run) for run, _ in good)
        pairs = [(run, base) for run, base in good if base and not base["diverged"]]
        gaps = [100 * (run["final_loss"] / base["final_loss"] - 1) for run, base in pairs]
        fewer = [1 - steps(run) / steps(base) for run, base in pairs]
        samples = statistics.fmean(run["curve"]["tokens"][-1] / CONTEXT for run, _ in good)
        last = statistics.fmean(run["rounds"][-1][1] for run, _ in good)
        each = ", ".join(f"{gap:+.1f}" for gap in gaps)
        rows.append(
            [
                *(name, f"{len(good)}{diverged}", f"{taken:,.0f}"),
                f"{statistics.fmean(fewer):.0%}" if fewer else "-",
                *(f"{samples / taken:.0f}", f"{last:.0f}"),
                spread([run["final_loss"] for run, _ in good]),
                f"{statistics.fmean(gaps):+.2f}% ({each})" if gaps else "-",
            ]
        )
    return table([*heads, "against the small batch (each seed)"], rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = study_parser(__doc__, Path("benchmarks/batch_metrics.json"))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args(words)
    if not options.table:
        in_processes(options, work)
    runs, tokens = Store(options.json).read(), options.tokens
    require(bool(runs), f"there are no runs in {options.json}; run without --table first")
    arms = {name: specs_of(trial, tokens) for name, trial in ARMS.items()}
    found = stored((spec for own in arms.values() for spec in own), runs)
    arms |= {name: specs_of(trial, tokens) for name, trial in ramps(found, tokens).items()}
    found = stored((spec for own in arms.values() for spec in own), runs)
    write_page(options.json, "batch_metrics", [comparison(arms, found)], [*found.values()])


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"batch_metrics: {error}")
