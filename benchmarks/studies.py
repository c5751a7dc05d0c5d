"""The claims of AdLoCo and DDP-Norm, each part alone and tuned: what does what?

    .venv/bin/python benchmarks/studies.py --parallel 2    # trains what is not stored
    .venv/bin/python benchmarks/studies.py --table     # trains nothing
    .venv/bin/python benchmarks/studies.py --study small-english --against "norm test, eta 1"
        # trains and writes nothing: the differences from another arm

The page (studies.md) has the problem, the batches, the protocol and the numbers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import run_script, table
from stored_runs import (
    TUNING_SEED,
    WORKERS,
    Result,
    Spec,
    Store,
    flags_of,
    study_parser,
    trained,
    write_page,
)

from adloco.errors import require
from adloco.study.statistics import paired_difference

TOKENS, CONTEXT, EVERY, SMALL, LARGEST = 600_000, 64, 20, 16, 256
ENGLISH = "../shared/data/tinyshakespeare/input.txt"
"""The file input.txt of github.com/karpathy/char-rnn, by its path from the repository."""
BASE = {"muon": 8e-3, "adamw": 2e-3}
RATES = (0.5, 1.0, 2.0)
STEP_SECONDS, BANDWIDTH, LATENCY = 0.05, 100e6 / 8, 0.02
MERGES = flags_of(
    "merge.policy=smallest merge.count=2 merge.every=2 merge.first_round=2 "
    "merge.requested_batch=sum"
)

Batches = Sequence[Mapping[str, str]]
"""The settings of a batch that an arm tries."""


def constant(*batches: int) -> Batches:
    return [{"batch.initial": str(batch)} for batch in batches]


def norm_test(*etas: float) -> Batches:
    rule = {"batch.rule": "norm-test", "batch.max_growth": "2"}
    return [rule | {"batch.eta": f"{eta:g}"} for eta in etas]


def ramp(*lasts: int, first: int = SMALL) -> Batches:
    rule = {"batch.rule": "ramp", "batch.first": str(first)}
    over = str(TOKENS // CONTEXT)
    return [rule | {"batch.last": str(last), "batch.over_samples": over} for last in lasts]


def seesaw(*firsts: int) -> Batches:
    return [{"batch.rule": "seesaw", "batch.initial": str(first)} for first in firsts]


def warmup(*stages: int) -> Batches:
    """Stages of 2.5% of the samples each, the last one until the end (arXiv 2412.21124)."""
    ends = [round(0.025 * number * TOKENS / CONTEXT) for number in range(1, len(stages))]
    rule = {"batch.rule": "warmup", "batch.initial": str(stages[0])}
    return [rule | {"batch.batches": str(list(stages[1:])), "batch.after_samples": str(ends)}]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with one combination of settings, but for what its trials choose."""

    method: str
    """The arm of bytes_to_loss.py: ddp, local-sgd or diloco."""
    batches: Batches
    inner: str
    momentum: float = 0.6
    trainers: int = 1
    merging: bool = True
    every: int = EVERY
    tokens: int = TOKENS
    problem: Mapping[str, str] = field(default_factory=dict)
    """Flags of another model or corpus."""

    def trials(self) -> list[Spec]:
        """The tuning runs: each batch with each learning rate."""
        return [self._trial(batch, rate) for batch in self.batches for rate in RATES]

    def _trial(self, batch: Mapping[str, str], rate: float) -> Spec:
        start = int(batch.get("batch.initial", SMALL))
        flags = flags_of(
            f"batch.maximum={LARGEST} switch.max_micro_batch={LARGEST} evaluation.every=1000000 "
            "inner.weight_decay=0"
        )
        flags |= {**batch, "batch.initial": str(start // self.trainers)}
        if "batch.eta" in batch:
            flags["batch.minimum"] = str(8 // self.trainers)
        # Seesaw's rate must be that of its first batch.
        own = batch.get("batch.rule") in (None, "seesaw")
        if "batch.rule" in batch:
            flags["learning_rate.coupling"] = "sqrt"
            flags["learning_rate.reference_batch"] = str(start if own else SMALL)
        if self.trainers > 1:
            each = WORKERS // self.trainers
            flags |= flags_of(
                f"method.num_trainers={self.trainers} method.workers_per_trainer={each}"
            )
            flags |= MERGES if self.merging else {}
        flags |= self.problem
        scale = (start / SMALL) ** 0.5 if own else 1.0
        return Spec(
            arm=self.method,
            inner=self.inner,
            inner_lr=rate * scale * BASE[self.inner],
            seed=TUNING_SEED,
            tokens=self.tokens,
            sync_every=self.every,
            outer_lr=0.7 if self.momentum else 1.0,
            momentum=self.momentum,
            problem=tuple(flags.items()),
        )


def factorial(inner: str) -> dict[str, Arm]:
    """Method, outer momentum, trainers and batch, by what the arms are called in the table."""
    one, test = constant(16, 64), norm_test(2, 3.5)
    diloco = Arm(method="diloco", batches=one, inner=inner)
    local_sgd = replace(diloco, method="local-sgd")
    adloco = replace(diloco, trainers=4, batches=test)
    return {
        "ddp": replace(diloco, method="ddp"),
        "LocalSGD": local_sgd,
        "DiLoCo 0.6": diloco,
        "DiLoCo 0": replace(diloco, momentum=0.0),
        "DiLoCo 0.9": replace(diloco, momentum=0.9),
        "DiLoCo 0.6, norm test": replace(diloco, batches=test),
        "DiLoCo 0.6, ramp": replace(diloco, batches=ramp(64, 256)),
        "DiLoCo 0.6, seesaw": replace(diloco, batches=seesaw(16, 32)),
        "4 trainers that merge, 0.6": replace(adloco, batches=one),
        "AdLoCo: 4 trainers that merge, 0.6, norm test": adloco,
        "AdLoCo with 0.9": replace(adloco, momentum=0.9),
        "AdLoCo with 2 trainers": replace(adloco, trainers=2),
        "AdLoCo without merging": replace(adloco, merging=False),
        "LocalSGD, norm test": replace(local_sgd, batches=test),
    }


def longer(times: int) -> dict[str, Arm]:
    """Arms of the factorial with Muon on that many times its tokens."""
    arms, tokens = factorial("muon"), times * TOKENS
    one, test = constant(16), norm_test(3.5)
    batches = {
        "LocalSGD": one,
        "DiLoCo 0.6": one,
        "DiLoCo 0.6, norm test": test,
        "AdLoCo: 4 trainers that merge, 0.6, norm test": test,
    }
    return {name: replace(arms[name], batches=own, tokens=tokens) for name, own in batches.items()}


def ddp_norm(inner: str) -> dict[str, Arm]:
    """Data-parallel training with batches up to 256."""
    every = {1: "each step", 100: "every 100 steps"}
    batches = {
        "constant 16": constant(16),
        "constant 64": constant(64),
        "constant 256": constant(256),
        "warm-up 64, 128, 256": warmup(64, 128, 256),
        **{f"norm test, eta {eta:g}": norm_test(eta) for eta in (0.05, 0.1, 0.2, 0.4, 1, 2, 3.5)},
    }
    arms = {
        name: Arm(method="ddp", batches=own, inner=inner, every=10) for name, own in batches.items()
    }
    test = arms["norm test, eta 2"]
    return arms | {
        f"norm test, eta 2, {name}": replace(test, every=steps) for steps, name in every.items()
    }


SAME_STEPS = ("constant 13", "ramp from 8 to 24", "ramp from 4 to 95")
"""Arms with the same number of steps, within 2%: which shape is best on a problem, and does it stay
the best on another?"""


def following(*only: str, **problem: str) -> dict[str, Arm]:
    """Schedules of the batch in data-parallel training, with a model and a corpus.

    only: Arms to keep; empty: all.
    """
    batches = {
        **{f"constant {batch}": constant(batch) for batch in (8, 16, 64)},
        **{f"ramp to {last}": ramp(last) for last in (64, 128, 256)},
        **dict(zip(SAME_STEPS, (constant(13), ramp(24, first=8), ramp(95, first=4)), strict=True)),
        "seesaw": seesaw(16),
        **{f"norm test, eta {eta}": norm_test(eta) for eta in (1, 2)},
    }
    flags = {name.replace("_", ".", 1): value for name, value in problem.items()}
    return {
        name: Arm(
            method="ddp",
            batches=own,
            inner="adamw",
            every=10,
            problem=flags,
        )
        for name, own in batches.items()
        if name in (only or batches)
    }


FEW = ("constant 16", *SAME_STEPS, "ramp to 64", "seesaw", "norm test, eta 2")
"""The arms with the default model, whose runs take longer."""
LARGE = dict.fromkeys(
    ("model_hidden_size", "model_num_layers", "model_num_heads", "model_intermediate_size"), "0"
)
"""The sizes of the default model."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms that are compared with one of them, and the seeds of their final runs."""

    arms: Mapping[str, Arm]
    against: str
    seeds: Sequence[int] = range(8)


STUDIES = {
    "muon": Study(arms=factorial("muon"), against="DiLoCo 0.6"),
    "adamw": Study(arms=factorial("adamw"), against="DiLoCo 0.6"),
    "twice-as-long": Study(arms=longer(2), against="DiLoCo 0.6", seeds=range(5)),
    "three-times-as-long": Study(arms=longer(3), against="DiLoCo 0.6", seeds=range(5)),
    "ddp-norm": Study(arms=ddp_norm("adamw"), against="constant 16"),
    "small-python": Study(arms=following(), against="constant 16"),
    "small-english": Study(arms=following(data_path=ENGLISH), against="constant 16"),
    "large-python": Study(arms=following(*FEW, **LARGE), against="constant 16", seeds=range(5)),
    "large-english": Study(
        arms=following(*FEW, **LARGE, data_path=ENGLISH), against="constant 16", seeds=range(5)
    ),
}


def best(arm: Arm, runs: Mapping[str, Result]) -> Spec | None:
    """The trial with the lowest loss; None until all are stored."""
    trials = arm.trials()
    if any(spec.key not in runs for spec in trials):
        return None
    losses = [runs[spec.key]["final_loss"] or float("inf") for spec in trials]
    return trials[losses.index(min(losses))]


def comparison(study: Study, runs: Mapping[str, Result]) -> str:
    """A row for each arm with stored runs; empty if no arm has any."""
    found: dict[str, tuple[Spec, dict[int, Result]]] = {}
    for name, arm in study.arms.items():
        if spec := best(arm, runs):
            keys = {seed: replace(spec, seed=seed).key for seed in study.seeds}
            known = {seed: runs[key] for seed, key in keys.items() if key in runs}
            found[name] = spec, {seed: run for seed, run in known.items() if not run["diverged"]}
    _, against = found.get(study.against, (None, {}))
    base = {seed: run["final_loss"] for seed, run in against.items()}
    rows = []
    for name, (spec, good) in found.items():
        if not good:
            continue
        losses = {seed: run["final_loss"] for seed, run in good.items()}
        percent = {seed: 100 * (x / base[seed]) for seed, x in losses.items() if seed in base}
        steps = statistics.fmean(run["inner_steps"] for run in good.values())
        syncs, size = (
            statistics.fmean(run["curve"][column][-1] for run in good.values())
            for column in ("syncs", "bytes")
        )
        seconds = steps * STEP_SECONDS + size / BANDWIDTH + syncs * 2 * (WORKERS - 1) * LATENCY
        counts = [str(len(good)), f"{steps:,.0f}", f"{syncs:,.0f}", f"{size / 1e6:,.1f}"]
        loss = f"{statistics.fmean(losses.values()):.4f}"
        rows.append([name, _chosen(spec), *counts, f"{seconds:,.0f}", loss, _difference(percent)])
    heads = ["arm", "chosen", "n", "steps", "syncs", "MB", "modelled s", "loss"]
    return table([*heads, f"against {study.against}"], rows) if rows else ""


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
    parser = study_parser(__doc__, Path("benchmarks/studies.json"))
    add = parser.add_argument
    add("--against", default="", help="arm whose differences are only printed")
    add("--study", nargs="+", choices=STUDIES, default=list(STUDIES), help="which to train")
    options = parser.parse_args(words)
    if not (options.table or options.against):
        for study in (STUDIES[name] for name in options.study):
            trained([spec for arm in study.arms.values() for spec in arm.trials()], options)
            stored = Store(options.json).read()
            chosen = [spec for arm in study.arms.values() if (spec := best(arm, stored))]
            trained([replace(spec, seed=seed) for seed in study.seeds for spec in chosen], options)
    runs = Store(options.json).read_some()
    if options.against:
        for name in options.study:
            arms = STUDIES[name].arms
            require(
                options.against in arms,
                f"--against must be an arm of {name}, one of: {'; '.join(arms)}",
            )
            print(comparison(replace(STUDIES[name], against=options.against), runs))
        return
    parts: list[str] = []
    for name, study in STUDIES.items():
        if rows := comparison(study, runs):
            parts += [f"## {name}", rows]
    write_page(options.json, "studies", parts, list(runs.values()))


if __name__ == "__main__":
    run_script("studies", main)
