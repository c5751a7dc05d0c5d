"""Compares rules for the batch at equal tokens: the loss, and the inner steps that it took.

    .venv/bin/python benchmarks/batch_metrics.py --jobs 2    # trains what is not stored
    .venv/bin/python benchmarks/batch_metrics.py --table     # trains nothing

**The problem** is that of `bytes_to_loss.py`, with data-parallel Muon as tuned in `frontier.py`:
133,440 parameters, 3M tokens (`--tokens`), no weight decay, and 16 samples per inner step with a
learning rate of 8e-3, which is the small batch here.

**Arms.** Constant batches have the learning rate times the root of the batch over 16. All others
begin with 16 samples, change the batch every 10 inner steps and never below 16 or above 256, and
their learning rate follows the root of the batch in the same way. Euclidean and muon are the norm
test in these norms (`batch.metric`), for several eta: 8 groups, at most twice the batch at a time,
four test steps a round. Seesaw's batch grows as the cosine falls. A ramp grows by equal factors for
equal tokens, and takes as many inner steps as the arm of metric muon that it is matched with (mean
over the seeds): the same growth without a look at the gradient.

Nothing was tuned for one arm alone. Each arm has the same seeds; differences are of runs of the
same seed, with the same initial parameters and the same data in the same order.

Every run is stored in the JSON file under a key of its settings, and stored runs are not repeated,
so the program can be stopped at any time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bytes_to_loss import OutOfTimeError, Result, Spec, Store, finish, provenance, train
from frontier import Trial, add_options, checked, in_processes

from adloco import BatchController, BatchGuards
from adloco.errors import require
from adloco.metrics import Record
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.run.training_run import TrainingRun

TOKENS, CONTEXT, SEEDS = 3_000_000, 64, (0, 1, 2)
SMALL, LARGEST, LR, STEPS = 16, 256, 8e-3, 10
GROWING = " ".join(
    (
        f"batch.initial={SMALL} batch.minimum={SMALL} batch.maximum={LARGEST}",
        f"switch.max_micro_batch={LARGEST} learning_rate.coupling=sqrt",
        f"learning_rate.reference_batch={SMALL}",
    )
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
    f"constant {SMALL}": constant(SMALL),
    **{f"constant {batch}": constant(batch) for batch in (32, 64, 128)},
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


def ramps(runs: Mapping[str, Result], tokens: int) -> dict[str, Trial]:
    """The ramps that are matched with arms of which all runs are stored."""
    found = {}
    for name, trial in MUON.items():
        own = [runs[spec.key] for spec in specs_of(trial, tokens) if spec.key in runs]
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


def work(json: Path, tokens: int, deadline: float) -> None:
    """Train what nobody has stored or begun: first the arms, then the ramps that they determine."""
    store = Store(json)

    def finish_all(trials: Mapping[str, Trial]) -> None:
        by_arm = [specs_of(trial, tokens) for trial in trials.values()]
        specs = [spec for of_seed in zip(*by_arm, strict=True) for spec in of_seed]
        finish(specs, store, 1, deadline, lambda spec, threads: train(spec, threads, Batches()))

    try:
        finish_all(ARMS)
        finish_all(ramps(store.read(), tokens))
    except OutOfTimeError:
        print("out of time; the same command continues from here", flush=True)


def page(runs: Mapping[str, Result], tokens: int) -> str:
    """The stored runs as Markdown."""
    arms = ARMS | ramps(runs, tokens)
    keys = {name: [spec.key for spec in specs_of(trial, tokens)] for name, trial in arms.items()}
    known = [runs[key] for own in keys.values() for key in own if key in runs]
    text = [f"# Rules for the batch, {tokens / 1e6:g}M tokens", *__doc__.split("\n\n")[2:]]
    return "\n\n".join([*text, table(keys, runs), provenance(known).strip()]) + "\n"


def table(keys: Mapping[str, Sequence[str]], runs: Mapping[str, Result]) -> str:
    """A row for each arm with stored runs, against those of the small batch.

    keys: By arm, those of its runs, a seed after the other.
    """
    small = [runs.get(key) for key in keys[f"constant {SMALL}"]]
    heads = ["arm", "seeds", "inner steps", "fewer", "mean batch", "last batch", "loss"]
    lines = [[*heads, "against the small batch (each seed)"]]
    lines.append(["---"] * len(lines[0]))
    for name, own in keys.items():
        found = [(runs[key], base) for key, base in zip(own, small, strict=True) if key in runs]
        good = [(run, base) for run, base in found if not run["diverged"]]
        diverged = f" ({len(found) - len(good)} diverged)" if len(good) < len(found) else ""
        if not good:
            lines += [[name, f"0{diverged}", *["-"] * 6]] if found else []
            continue
        losses = [run["final_loss"] for run, _ in good]
        taken = statistics.fmean(steps(run) for run, _ in good)
        pairs = [(run, base) for run, base in good if base and not base["diverged"]]
        gaps = [100 * (run["final_loss"] / base["final_loss"] - 1) for run, base in pairs]
        fewer = [1 - steps(run) / steps(base) for run, base in pairs]
        samples = statistics.fmean(run["curve"]["tokens"][-1] / CONTEXT for run, _ in good)
        last = statistics.fmean(run["rounds"][-1][1] for run, _ in good)
        each = ", ".join(f"{gap:+.1f}" for gap in gaps)
        lines.append(
            [
                *(name, f"{len(good)}{diverged}", f"{taken:,.0f}"),
                f"{statistics.fmean(fewer):.0%}" if fewer else "-",
                *(f"{samples / taken:.0f}", f"{last:.0f}"),
                f"{statistics.fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
                f"{statistics.fmean(gaps):+.2f}% ({each})" if gaps else "-",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if not options.table:
        deadline = time.monotonic() + 60 * options.minutes
        in_processes(options.jobs, work, options.json, options.tokens, deadline)
    runs = Store(options.json).read()
    require(bool(runs), f"there are no runs in {options.json}; run without --table first")
    options.json.with_suffix(".md").write_text(text := page(runs, options.tokens))
    print(text)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run")
    parser.add_argument("--table", action="store_true", help="only write the table")
    add_options(parser, Path("benchmarks/batch_metrics.json"))
    return checked(parser, words)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"batch_metrics: {error}")
