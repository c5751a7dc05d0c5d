"""Which part of AdLoCo does what: method, outer momentum, trainers and batch, each changed alone.

    .venv/bin/python benchmarks/factorial.py --jobs 2    # trains what is not stored
    .venv/bin/python benchmarks/factorial.py --table     # trains nothing

**The problem** is that of `bytes_to_loss.py`, shorter: 133,440 parameters, bytes of the default
corpus, windows of 64, 600k tokens over all trainers, cosine learning rate. Four workers in all arms
but ddp, whose one worker has the gradient of four. H = 20 where workers sync. The trainers of an
arm begin with 16 samples a step together; where they merge, two do so after rounds 2, 4 and 6,
until one is left, and the merged trainer asks for the sum of their batches.

**Batches.** Constant ones are 16 or 64 samples of all workers. Norm tests ask for B / eta^2, at
least two samples a worker and at most 256. A ramp grows by equal factors for equal tokens, from 16;
Seesaw's batch grows as the cosine falls. Where the batch changes, the learning rate follows its
root.

**Protocol.** Every arm has six trials with seed 1000: three learning rates (0.5, 1 and 2 times the
optimizer's base rate, 8e-3 for Muon and 4e-3 for AdamW, times the root of the batch over 16 where
it is constant) with each of two batches: constant 16 and 64; eta 2 and 3.5; a ramp to 64 and to
256; Seesaw from 16 and from 32. The best trial has the final runs, seeds 0 to 7. Differences are of
runs of one seed, with the 95% interval of Student's t; "n" is their number. The outer learning rate
is 0.7 with Nesterov momentum, and 1 without momentum.

**Numbers.** Steps are those of a worker, MB what a worker hands to reductions with others (ddp: at
each step). Modelled seconds are 50 ms for a step, whatever its batch, and for each sync the MB at
100 Mbit/s and 2 (W - 1) times 20 ms, with W = 4: a cluster of GPUs that are not full, on a slow
link.

Every run is stored in the JSON file under a key of its settings, and stored runs are not repeated,
so the program can be stopped at any time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bytes_to_loss import (
    TUNING_SEED,
    OutOfTimeError,
    Result,
    Spec,
    Store,
    finish,
    provenance,
    train,
)
from frontier import add_options, checked, in_processes

from adloco.errors import require
from adloco.metrics import Record
from adloco.run.training_run import TrainingRun
from adloco.study.statistics import paired_difference

TOKENS, CONTEXT, EVERY, SMALL, LARGEST, WORKERS = 600_000, 64, 20, 16, 256, 4
SEEDS = tuple(range(8))
BASE = {"muon": 8e-3, "adamw": 4e-3}
RATES = (0.5, 1.0, 2.0)
STEP_SECONDS, BANDWIDTH, LATENCY = 0.05, 100e6 / 8, 0.02
MERGES = {
    "merge.policy": "smallest",
    "merge.count": "2",
    "merge.every": "2",
    "merge.first_round": "2",
    "merge.requested_batch": "sum",
}
COUPLED = {"learning_rate.coupling": "sqrt", "learning_rate.reference_batch": str(SMALL)}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One combination of the factors."""

    method: str
    """The arm of bytes_to_loss.py: ddp, local-sgd or diloco."""
    batch: str = "constant"
    momentum: float = 0.6
    trainers: int = 1
    merging: bool = True
    inner: str = "muon"

    def trials(self) -> list[Spec]:
        """The tuning runs."""
        samples = str(TOKENS // CONTEXT)
        variants = {
            "constant": [{"batch.initial": "16"}, {"batch.initial": "64"}],
            "norm test": [
                {"batch.rule": "norm-test", "batch.eta": eta, "batch.max_growth": "2"}
                for eta in ("2", "3.5")
            ],
            "ramp": [
                {
                    "batch.rule": "ramp",
                    "batch.first": "16",
                    "batch.last": last,
                    "batch.over_samples": samples,
                }
                for last in ("64", "256")
            ],
            "seesaw": [{"batch.rule": "seesaw", "batch.initial": first} for first in ("16", "32")],
        }[self.batch]
        found = []
        for own in variants:
            start = int(own.get("batch.initial", SMALL))
            each = str(start // self.trainers)
            flags = {"batch.initial": each, "batch.maximum": str(LARGEST)} | own
            flags |= {"batch.initial": each, "switch.max_micro_batch": str(LARGEST)}
            flags |= {"evaluation.every": "1000000", "inner.weight_decay": "0"}
            if self.batch == "norm test":
                flags["batch.minimum"] = str(8 // self.trainers)
            if self.batch != "constant":
                flags |= COUPLED
            if self.trainers > 1:
                flags |= {
                    "method.num_trainers": str(self.trainers),
                    "method.workers_per_trainer": str(WORKERS // self.trainers),
                }
                flags |= MERGES if self.merging else {}
            scale = (start / SMALL) ** 0.5 if self.batch == "constant" else 1.0
            found += [
                Spec(
                    arm=self.method,
                    inner=self.inner,
                    inner_lr=rate * scale * BASE[self.inner],
                    seed=TUNING_SEED,
                    tokens=TOKENS,
                    sync_every=EVERY,
                    outer_lr=0.7 if self.momentum else 1.0,
                    momentum=self.momentum,
                    problem=tuple(flags.items()),
                )
                for rate in RATES
            ]
        return found


def arms(inner: str) -> dict[str, Arm]:
    """By what they are called in the table."""
    local = {"ddp": Arm(method="ddp"), "LocalSGD": Arm(method="local-sgd")}
    diloco = {f"DiLoCo {m:g}": Arm(method="diloco", momentum=m) for m in (0.0, 0.6, 0.9)}
    batches = {
        f"DiLoCo 0.6, {batch}": Arm(method="diloco", batch=batch)
        for batch in ("norm test", "ramp", "seesaw")
    }
    merging = {
        "4 trainers that merge, 0.6": Arm(method="diloco", trainers=4),
        "AdLoCo: 4 trainers that merge, 0.6, norm test": Arm(
            method="diloco", trainers=4, batch="norm test"
        ),
        "AdLoCo with 0.9": Arm(method="diloco", trainers=4, batch="norm test", momentum=0.9),
        "AdLoCo with 2 trainers": Arm(method="diloco", trainers=2, batch="norm test"),
        "AdLoCo without merging": Arm(
            method="diloco", trainers=4, batch="norm test", merging=False
        ),
    }
    several = {"LocalSGD, norm test": Arm(method="local-sgd", batch="norm test")}
    found = local | diloco | batches | merging | several
    return {f"{inner}: {name}": replace(arm, inner=inner) for name, arm in found.items()}


ARMS = arms("muon") | arms("adamw")
AGAINST = "DiLoCo 0.6"


def watch(run: TrainingRun, record: Record) -> Result:
    """Called after each round; returns what is added to the run's result."""
    return {"inner_steps": record["inner_steps"], "samples": record["samples"]}


def best(arm: Arm, runs: Mapping[str, Result]) -> Spec | None:
    """The trial with the lowest loss; None until all are stored."""
    trials = arm.trials()
    if any(spec.key not in runs for spec in trials):
        return None
    losses = [runs[spec.key]["final_loss"] or float("inf") for spec in trials]
    return trials[losses.index(min(losses))]


def work(json: Path, deadline: float) -> None:
    """Train what nobody has stored or begun: the trials, then all arms, a seed after the other."""
    store = Store(json)

    def done(specs: Sequence[Spec]) -> None:
        finish(specs, store, 1, deadline, lambda spec, threads: train(spec, threads, watch))

    try:
        for inner in BASE:
            own = [arm for name, arm in ARMS.items() if name.startswith(inner)]
            done([spec for arm in own for spec in arm.trials()])
            runs = store.read()
            chosen = [spec for arm in own if (spec := best(arm, runs))]
            done([replace(spec, seed=seed) for seed in SEEDS for spec in chosen])
    except OutOfTimeError:
        print("out of time; the same command continues from here", flush=True)


def page(runs: Mapping[str, Result]) -> str:
    """The stored runs as Markdown."""
    found = {}
    for name, arm in ARMS.items():
        spec = best(arm, runs)
        keys = {seed: replace(spec, seed=seed).key for seed in SEEDS} if spec else {}
        found[name] = (spec, {seed: runs[key] for seed, key in keys.items() if key in runs})
    known = [run for _, own in found.values() for run in own.values()]
    text = ["# Which part of AdLoCo does what", *__doc__.split("\n\n")[2:], table(found)]
    return "\n\n".join([*text, provenance(known).strip()]) + "\n"


def table(found: Mapping[str, tuple[Spec | None, Mapping[int, Result]]]) -> str:
    heads = ["arm", "chosen", "n", "steps", "syncs", "MB", "modelled s", "loss"]
    lines = [[*heads, f"against {AGAINST}"]]
    lines.append(["---"] * len(lines[0]))
    for name, (spec, runs) in found.items():
        good = {seed: run for seed, run in runs.items() if not run["diverged"]}
        if not spec or not good:
            continue
        base = found[f"{spec.inner}: {AGAINST}"][1]
        losses = {seed: run["final_loss"] for seed, run in good.items()}
        percent = {s: 100 * x / base[s]["final_loss"] for s, x in losses.items() if s in base}
        steps = statistics.fmean(run["inner_steps"] for run in good.values())
        syncs = statistics.fmean(run["curve"]["syncs"][-1] for run in good.values())
        size = statistics.fmean(run["curve"]["bytes"][-1] for run in good.values())
        seconds = steps * STEP_SECONDS + size / BANDWIDTH + syncs * 2 * (WORKERS - 1) * LATENCY
        lines.append(
            [
                *(name, _chosen(spec), str(len(good)), f"{steps:,.0f}", f"{syncs:,.0f}"),
                *(f"{size / 1e6:,.1f}", f"{seconds:,.0f}"),
                f"{statistics.fmean(losses.values()):.4f}",
                _difference(percent),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _chosen(spec: Spec) -> str:
    flags = dict(spec.problem)
    names = {"batch.eta": "eta", "batch.last": "to"}
    more = [f"{short} {flags[name]}" for name, short in names.items() if name in flags]
    return ", ".join([f"lr {spec.inner_lr:.2g}", f"batch {flags['batch.initial']}", *more])


def _difference(percent: Mapping[int, float]) -> str:
    """How far losses in percent of another arm's, by seed, are from 100, with the interval."""
    other = dict.fromkeys(percent, 100.0)
    found = paired_difference("this", "other", {"this": percent, "other": other})
    if found is None or found.half_width is None or percent == other:
        return "-"
    return f"{found.mean:+.2f}% ± {found.half_width:.2f} (n = {found.seeds})"


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if not options.table:
        deadline = time.monotonic() + 60 * options.minutes
        in_processes(options.jobs, work, options.json, deadline)
    runs = Store(options.json).read()
    require(bool(runs), f"there are no runs in {options.json}; run without --table first")
    options.json.with_suffix(".md").write_text(text := page(runs))
    print(text)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="only write the table")
    add_options(parser, Path("benchmarks/factorial.json"))
    return checked(parser, words)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"factorial: {error}")
