"""Looks for DDP-Muon's loss with four workers and hundreds of times fewer bytes.

    .venv/bin/python benchmarks/frontier.py --stage trials --jobs 2    # one seed, many settings
    .venv/bin/python benchmarks/frontier.py --stage final --jobs 2     # the best, three seeds
    .venv/bin/python benchmarks/frontier.py --stage trials --model default    # a larger model
    .venv/bin/python benchmarks/frontier.py --stage table              # trains nothing

**The problem**, the arms, the counting of bytes and the store of runs are those of
`bytes_to_loss.py`: 133,440 parameters, 3M tokens, Muon; four workers share a batch. All have the
same tokens. Here weight decay is 0, where nothing else is said, and the batch of all workers is
tuned too; where it grows, it does so by equal factors, and the learning rate follows its root. The
second problem, the default model, is that of the recipe adloco with its data and tokens: 869,504
parameters, samples of 128 tokens, 600k tokens; the third, longer, is the same with 2.4M tokens.
outer-alone is data-parallel training with an outer step every H steps (one worker with the batch of
all): a second control, which sends as many bytes as ddp.

**Protocol.** Trials have a seed of their own, 1000, and one run for each setting. A trial changes
one or two things of another; nothing was chosen on the seeds of the final runs. ddp is tuned in
learning rate, batch (also growing), final learning rate, momentum and weight decay, with 25 runs;
outer-alone with 4; the arms that send less with 87, because they have more settings: also H, its
growth, the outer rate and momentum, the wire format, feedback and streaming. The final runs (seeds
0, 1, 2) are, of the trials with a constant batch, the best of ddp and of outer-alone; the best two
with at most 1/200 of ddp's bytes, of different batches; the best of these with a constant H; and
the best with at most 1.58 MB, a thousandth (those with H = 62 and 31, which are better, send 1.62
and 1.60 MB). Of the trials whose batch and learning rate grow, which came later: the best of ddp,
and the best with at most 1/200 and 1/1,000 of its bytes. Trials of feedback, inner momentum and
streaming came after the final runs, and those of 1 bit last: final are the best two with at most
1/200, of different batches, and the best with at most 1/1,000. Only the runs with 1 bit keep what
the second encoding of a sum loses; the others are older and lose it. On the default model, ddp is
tuned with 11 runs and the arms that send less with 28; final are the best two of ddp, of different
batches, and, with 2 bits and with 1, the best with at most 1/200 and 1/1,000 of the bytes of ddp
with a batch of 8. On longer, each arm has two runs, by the learning rate. Losses of single runs of
a setting differ by about 0.005 between seeds, so small differences between trials mean nothing.

**Numbers.** MB is what a worker hands to reductions with others in the whole run, in one
direction; "fewer" compares it with ddp with a batch of 16 (default model: 8). The tail's loss is
that of the mean of the global parameters at the ends of the rounds in the last tenth of the tokens;
nothing else uses that mean.
"""

import argparse
import copy
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bytes_to_loss import (
    TUNING_SEED,
    OutOfTimeError,
    Result,
    Spec,
    Store,
    finish,
    megabytes,
    provenance,
    train,
)
from torch import Tensor

from adloco.errors import require
from adloco.metrics import Record
from adloco.run.training_run import TrainingRun

SEEDS = (0, 1, 2)
TAIL = 0.1
"""The last part of a run, whose global parameters are averaged."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, and for how long."""

    tokens: int
    context: int
    """Tokens of a sample."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """What differs from the problem of bytes_to_loss.py."""


SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
PROBLEMS = {
    "small": Problem(tokens=3_000_000, context=64),
    # A shape of zeros is the one of `model.shape`, as in the recipe adloco.
    "default": Problem(
        tokens=600_000,
        context=128,
        flags={f"model.{name}": "0" for name in SHAPE} | {"data.context_tokens": "128"},
    ),
}
PROBLEMS["longer"] = replace(PROBLEMS["default"], tokens=2_400_000)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting of an arm."""

    arm: str
    model: str = "small"
    """A name in PROBLEMS."""
    batch: int = 16
    grows_to: int = 0
    """The batch at the end of the run, which grows by equal factors; 0: it is constant."""
    coupled: bool = True
    """True if the learning rate grows with the root of the batch."""
    lr: float = 8e-3
    sync_every: int = 0
    """H; 0 for ddp."""
    growth: float = 0.0
    outer: tuple[float, float] = (0.7, 0.6)
    """Learning rate and Nesterov momentum of the outer step."""
    more: str = ""
    """Further settings, as `section.key=value` separated by blanks."""

    def spec(self, seed: int) -> Spec:
        problem = PROBLEMS[self.model]
        flags = {"inner.weight_decay": "0", "evaluation.every": "1000000", **problem.flags}
        if self.batch != 16:
            flags |= dict.fromkeys(("batch.initial", "switch.max_micro_batch"), str(self.batch))
        if self.grows_to:
            flags |= self._growing(problem)
        if self.growth:
            flags["method.sync_growth"] = f"{self.growth:g}"
        flags |= dict(word.split("=") for word in self.more.split())
        return Spec(
            arm=self.arm,
            inner="muon",
            inner_lr=self.lr,
            seed=seed,
            tokens=problem.tokens,
            sync_every=self.sync_every or 40,
            outer_lr=self.outer[0],
            momentum=self.outer[1],
            problem=tuple(flags.items()),
        )

    def _growing(self, problem: Problem) -> dict[str, str]:
        first, last = str(self.batch), str(self.grows_to)
        return {
            "batch.rule": "ramp",
            "batch.first": first,
            "batch.last": last,
            "batch.over_samples": str(problem.tokens // problem.context),
            "batch.initial": first,
            "batch.maximum": last,
            "switch.max_micro_batch": last,
        } | (
            {"learning_rate.coupling": "sqrt", "learning_rate.reference_batch": first}
            if self.coupled
            else {}
        )

    @property
    def cells(self) -> list[str]:
        outer = [f"{self.outer[0]:g} / {self.outer[1]:g}", str(self.sync_every), f"{self.growth:g}"]
        own = outer if self.sync_every else ["-"] * 3
        batch = f"{self.batch} to {self.grows_to}" if self.grows_to else str(self.batch)
        more = [] if self.coupled else ["lr not coupled"]
        return [self.arm, batch, f"{self.lr:g}", *own, ", ".join(more + self.more.split())]


def ddp(batch: int, *rates: float, **others: Any) -> list[Trial]:
    return [Trial(arm="ddp", batch=batch, lr=rate, **others) for rate in rates]


def syncing(arm: str, batch: int, *several: tuple[float, int, float], **others: Any) -> list[Trial]:
    """Trials of (learning rate, H, growth)."""
    return [
        Trial(arm=arm, batch=batch, lr=lr, sync_every=every, growth=growth, **others)
        for lr, every, growth in several
    ]


INT4, INT2, INT1 = "diloco-int4", "diloco-int2", "diloco-int1"
TO_ZERO = "learning_rate.final_fraction=0"
TRIALS = [
    *ddp(8, 8e-3),
    *ddp(16, 5.6e-3, 8e-3, 1.2e-2),
    *ddp(32, 5.6e-3, 8e-3, 1.2e-2, 1.7e-2),
    *ddp(64, 1.1e-2, 1.6e-2, 2.2e-2),
    *ddp(128, 2.2e-2),
    *ddp(16, 1.2e-2, grows_to=64, coupled=False),
    *ddp(32, 1.6e-2, grows_to=128, coupled=False),
    *ddp(16, 8e-3, more=TO_ZERO),
    *ddp(16, 8e-3, more="inner.momentum=0.95"),
    *ddp(16, 8e-3, more="inner.weight_decay=0.02"),
    *ddp(16, 1.2e-2, more="inner.weight_decay=0.1"),
    *ddp(64, 1.6e-2, more=TO_ZERO),
    *ddp(64, 1.6e-2, more="inner.momentum=0.95"),
    *syncing("outer-alone", 16, (8e-3, 30, 0), (8e-3, 15, 1)),
    *syncing("outer-alone", 64, (1.6e-2, 8, 0), (1.6e-2, 30, 0)),
    # A constant H.
    *syncing("diloco", 64, (1.6e-2, 8, 0)),
    *syncing(INT4, 16, (8e-3, 10, 0), (8e-3, 30, 0)),
    *syncing(INT4, 16, (8e-3, 30, 0), more=TO_ZERO),
    *syncing(INT4, 32, (8e-3, 15, 0), (1.2e-2, 15, 0)),
    *syncing(INT4, 64, (1.1e-2, 8, 0), (1.6e-2, 8, 0)),
    *(
        trial
        for outer in ((1.0, 0.0), (0.7, 0.4), (0.5, 0.6), (1.0, 0.6), (0.7, 0.8))
        for trial in syncing(INT4, 64, (1.6e-2, 8, 0), outer=outer)
    ),
    *syncing(INT4, 64, (1.6e-2, 8, 0), more=TO_ZERO),
    *syncing(INT4, 128, (2.2e-2, 4, 0)),
    *syncing(INT2, 16, (8e-3, 15, 0)),
    *syncing(INT2, 32, (8e-3, 8, 0), (1.2e-2, 8, 0)),
    *syncing(INT2, 64, (1.1e-2, 4, 0), (1.6e-2, 4, 0)),
    *syncing(INT2, 128, (2.2e-2, 2, 0)),
    # An H that grows as the learning rate falls.
    *syncing("diloco", 32, (8e-3, 5, 1)),
    *syncing(INT4, 16, (8e-3, 15, 1), (8e-3, 17, 1), (8e-3, 10, 2)),
    *syncing(INT4, 32, (8e-3, 9, 1)),
    *syncing(INT2, 16, (5.6e-3, 9, 1), (8e-3, 9, 1), (1.1e-2, 9, 1)),
    *syncing(INT2, 16, (8e-3, 11, 0.5), (8e-3, 8, 1.5)),
    *syncing(INT2, 32, (8e-3, 5, 1), (1.1e-2, 5, 1)),
    *syncing(INT2, 32, (8e-3, 5, 1), outer=(1.0, 0.6)),
    *syncing(INT2, 32, (8e-3, 5, 1), outer=(0.7, 0.4)),
    *syncing(INT2, 32, (8e-3, 5, 1), more="wire.error_feedback=1"),
    *syncing(INT2, 32, (8e-3, 5, 1), more="inner.momentum=0.95"),
    *syncing(INT2, 64, (1.6e-2, 3, 1)),
    # About a thousandth of ddp's bytes.
    *syncing(INT2, 64, (1.6e-2, 28, 0)),
    *syncing(INT2, 64, (1.6e-2, 28, 0), outer=(1.0, 0.6)),
    *syncing(INT2, 64, (1.6e-2, 28, 0), outer=(0.7, 0.8)),
    *syncing(INT2, 128, (1.6e-2, 14, 0), (2.2e-2, 14, 0)),
    *syncing(INT2, 32, (1.1e-2, 54, 0), outer=(1.0, 0.6)),
    *syncing(INT2, 16, (8e-3, 62, 1)),
    *syncing(INT2, 16, (8e-3, 62, 1), (8e-3, 52, 1.5), outer=(1.0, 0.6)),
    *syncing(INT2, 32, (1.1e-2, 31, 1)),
    *syncing(INT2, 32, (8e-3, 31, 1), (1.1e-2, 31, 1), outer=(1.0, 0.6)),
    *syncing(INT2, 32, (1.1e-2, 31, 1), outer=(1.0, 0.8)),
    *syncing(INT2, 64, (1.6e-2, 15, 1), outer=(1.0, 0.6)),
    # A batch that grows, and the learning rate with it.
    *ddp(16, 8e-3, 1.1e-2, grows_to=256),
    *ddp(32, 1.1e-2, grows_to=256),
    *syncing(INT2, 16, (8e-3, 6, 0), (1.1e-2, 6, 0), grows_to=256),
    *syncing(INT2, 16, (8e-3, 4, 1), (1.1e-2, 4, 1), grows_to=256),
    *syncing(INT2, 16, (8e-3, 6, 0), grows_to=256, outer=(1.0, 0.6)),
    *syncing(INT2, 32, (1.1e-2, 4, 0), (1.1e-2, 3, 1), (1.6e-2, 3, 1), grows_to=256),
    *syncing(
        INT2,
        16,
        *((8e-3, 31, 0), (1.1e-2, 31, 0), (8e-3, 18, 1)),
        grows_to=256,
        outer=(1.0, 0.6),
    ),
    *syncing(INT2, 32, (1.1e-2, 19, 0), (1.1e-2, 12, 1), grows_to=256, outer=(1.0, 0.6)),
    # Fragments that are in flight while training goes on, and how much of them arrives.
    *syncing(INT4, 64, (1.6e-2, 8, 0), more="streaming.fragments=2"),
    *syncing(INT4, 64, (1.6e-2, 8, 0), more="streaming.fragments=2 streaming.tau=3"),
    *syncing(
        INT4, 64, (1.6e-2, 8, 0), more="streaming.fragments=2 streaming.tau=3 streaming.alpha=0"
    ),
    *syncing(INT4, 64, (1.6e-2, 8, 0), more="streaming.tau=3"),
    # All of what a sync leaves unsent is sent later.
    *syncing(INT2, 16, (1.1e-2, 6, 0), grows_to=256, more="wire.error_feedback=1"),
    # 1 bit, with what sums lose kept.
    *syncing(INT1, 16, (1.1e-2, 5, 1), (1.1e-2, 4, 1), (8e-3, 4, 1)),
    *syncing(INT1, 32, (1.1e-2, 3, 1), (1.1e-2, 2, 1), (1.1e-2, 11, 1)),
    *syncing(INT1, 64, (1.6e-2, 1, 1)),
    *syncing(INT1, 32, (1.1e-2, 11, 1), (1.6e-2, 11, 1), outer=(1.0, 0.6)),
    *syncing(INT1, 16, (1.1e-2, 22, 1), outer=(1.0, 0.6)),
    # The default model.
    *ddp(8, 8e-3, model="default"),
    *ddp(8, 8e-3, model="default", grows_to=64),
    *syncing(INT2, 8, (8e-3, 7, 0), model="default", grows_to=64),
    *syncing(INT2, 8, (8e-3, 42, 0), model="default", grows_to=64, outer=(1.0, 0.6)),
    *ddp(8, 1.1e-2, model="default"),
    *syncing("outer-alone", 8, (8e-3, 30, 0), model="default"),
    *syncing(INT2, 8, (1.1e-2, 7, 0), model="default", grows_to=64),
    *syncing(INT2, 8, (1.1e-2, 42, 0), model="default", grows_to=64, outer=(1.0, 0.6)),
    *ddp(8, 5.6e-3, model="default"),
    *ddp(4, 5.6e-3, 8e-3, model="default"),
    *ddp(16, 8e-3, 1.1e-2, model="default"),
    *ddp(8, 8e-3, model="default", more="inner.weight_decay=0.1"),
    *ddp(8, 8e-3, model="default", more=TO_ZERO),
    *syncing(INT2, 8, (8e-3, 16, 0), (1.1e-2, 16, 0), (8e-3, 9, 1), model="default"),
    *syncing(INT2, 8, (8e-3, 16, 0), model="default", outer=(1.0, 0.6)),
    *syncing(INT2, 8, (8e-3, 16, 0), model="default", outer=(0.7, 0.4)),
    *syncing(INT2, 4, (5.6e-3, 32, 0), (8e-3, 32, 0), (8e-3, 18, 1), model="default"),
    *syncing(INT2, 4, (8e-3, 32, 0), model="default", outer=(1.0, 0.6)),
    *syncing(INT2, 16, (1.1e-2, 8, 0), model="default"),
    *syncing(INT2, 8, (8e-3, 98, 0), model="default", outer=(1.0, 0.6)),
    *syncing(INT2, 4, (8e-3, 196, 0), model="default", outer=(1.0, 0.6)),
    *syncing(INT2, 8, (5.6e-3, 9, 1), (8e-3, 5, 2), model="default"),
    *syncing(INT2, 8, (8e-3, 9, 1), (8e-3, 5, 2), model="default", outer=(1.0, 0.6)),
    *syncing("diloco", 8, (8e-3, 9, 1), model="default"),
    *ddp(4, 4e-3, model="default"),
    *syncing(INT1, 8, (8e-3, 4, 1), (1.1e-2, 4, 1), model="default"),
    *syncing(INT1, 8, (8e-3, 4, 1), model="default", outer=(1.0, 0.6)),
    *syncing(
        INT1,
        8,
        *((8e-3, 24, 1), (8e-3, 44, 0), (8e-3, 27, 1), (8e-3, 32, 1)),
        model="default",
        outer=(1.0, 0.6),
    ),
    # The same for four times as many tokens.
    *ddp(8, 4e-3, 5.6e-3, model="longer"),
    *syncing(INT1, 8, (5.6e-3, 4, 1), (8e-3, 4, 1), model="longer"),
]
FINALS = [
    *ddp(16, 8e-3),
    *syncing("outer-alone", 16, (8e-3, 30, 0)),
    *syncing(INT2, 16, (1.1e-2, 9, 1)),
    *syncing(INT2, 32, (1.1e-2, 5, 1)),
    *syncing(INT2, 32, (8e-3, 8, 0)),
    *syncing(INT2, 64, (1.6e-2, 28, 0), outer=(1.0, 0.6)),
    *ddp(16, 8e-3, grows_to=256),
    *syncing(INT2, 16, (1.1e-2, 6, 0), grows_to=256),
    *syncing(INT2, 32, (1.1e-2, 19, 0), grows_to=256, outer=(1.0, 0.6)),
    *syncing(INT1, 32, (1.1e-2, 3, 1)),
    *syncing(INT1, 16, (1.1e-2, 4, 1)),
    *syncing(INT1, 32, (1.1e-2, 11, 1), outer=(1.0, 0.6)),
    *ddp(8, 5.6e-3, model="default"),
    *ddp(4, 4e-3, model="default"),
    *syncing(INT2, 8, (8e-3, 9, 1), model="default", outer=(1.0, 0.6)),
    *syncing(INT2, 8, (8e-3, 98, 0), model="default", outer=(1.0, 0.6)),
    *syncing(INT1, 8, (1.1e-2, 4, 1), model="default"),
    *syncing(INT1, 8, (8e-3, 32, 1), model="default", outer=(1.0, 0.6)),
    *ddp(8, 5.6e-3, model="longer"),
]
"""The best trials, as the protocol says."""


class TailMean:
    """The mean of the global parameters over the end of a run, evaluated when it is over."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._count = 0

    def __call__(self, run: TrainingRun, record: Record) -> Result:
        """Called after each round; returns what is added to the run's result."""
        tokens = run.recipe.run.limits["tokens"]
        if record["tokens"] <= (1 - TAIL) * tokens:
            return {}
        (trainer,) = run.algorithm.state.trainers.values()
        now = [parameter.detach().double() for parameter in trainer.outer.global_params]
        self._sums = [a + b for a, b in zip(self._sums, now, strict=True)] if self._sums else now
        self._count += 1
        return {"tail_loss": round(self._loss(run), 5)} if record["tokens"] >= tokens else {}

    def _loss(self, run: TrainingRun) -> float:
        model = copy.deepcopy(next(iter(run.algorithm.workers.values())).model).eval()
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), self._sums, strict=True):
                parameter.copy_(total / self._count)
            nats, *_, windows = run.task.measure(model, run.device, 64)
        return nats / windows


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if options.stage != "table":
        deadline = time.monotonic() + 60 * options.minutes
        in_processes(options.jobs, work, options.stage, options.model, options.json, deadline)
    runs = Store(options.json).read()
    require(bool(runs), f"there are no runs in {options.json}; run --stage trials first")
    options.json.with_suffix(".md").write_text(text := tables(runs))
    print(text)


def work(stage: str, model: str, json: Path, deadline: float) -> None:
    """Train the runs of a stage that nobody has stored or begun, one after another."""
    specs = [trial.spec(TUNING_SEED) for trial in of(model, TRIALS)]
    if stage == "final":
        specs = [trial.spec(seed) for seed in SEEDS for trial in of(model, FINALS)]
    try:
        finish(
            specs, Store(json), 1, deadline, lambda spec, threads: train(spec, threads, TailMean())
        )
    except OutOfTimeError:
        print("out of time; the same command continues from here", flush=True)


def of(model: str, trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.model == model]


def tables(runs: dict[str, Result]) -> str:
    """The stored runs as Markdown: of each model the final runs, then the trials."""
    parts = ["# Data-parallel Muon's loss with fewer bytes", *__doc__.split("\n\n")[2:]]
    known: list[Result] = []
    for model in PROBLEMS:
        for name, trials, seeds in (
            ("final runs", FINALS, SEEDS),
            ("trials", TRIALS, (TUNING_SEED,)),
        ):
            keys = {trial: [trial.spec(seed).key for seed in seeds] for trial in of(model, trials)}
            found = [runs[key] for several in keys.values() for key in several if key in runs]
            known += found
            if found:
                parts += [f"## The {model} model: {name}", table(keys, runs)]
    return "\n\n".join([*parts, provenance(known).strip()]) + "\n"


def table(rows: dict[Trial, list[str]], runs: dict[str, Result]) -> str:
    """A row for each trial with stored runs; differences are to the best ddp of the rows."""
    (model,) = {trial.model for trial in rows}
    found = {trial: [runs[key] for key in keys if key in runs] for trial, keys in rows.items()}
    found = {trial: results for trial, results in found.items() if results}
    goal = min(
        (mean(results, "final_loss") for trial, results in found.items() if trial.arm == "ddp"),
        default=float("nan"),
    )
    sent = megabytes_of(runs.get(of(model, FINALS)[0].spec(TUNING_SEED).key)) or float("nan")
    heads = ["arm", "batch", "lr", "outer", "H", "growth", "more", "seeds", "loss", "against ddp"]
    heads += ["tail's loss", "MB", "fewer", "syncs"]
    lines = [heads, ["---"] * len(heads)]
    for trial, results in found.items():
        losses = [one["final_loss"] for one in results if not one["diverged"]]
        cells = [*trial.cells, str(len(results))]
        if not losses:
            lines.append([*cells, "diverged", *["-"] * 5])
            continue
        loss, each = statistics.fmean(losses), megabytes_of(results[0])
        spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
        cells += [f"{loss:.4f}{spread}", f"{100 * (loss / goal - 1):+.1f}%"]
        cells += [f"{mean(results, 'tail_loss'):.4f}", megabytes(1e6 * each)]
        cells += [f"{sent / each:.{1 if each > sent / 10 else 0}f}x"]
        lines.append([*cells, f"{results[0]['curve']['syncs'][-1]:,}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean(results: Sequence[Result], name: str) -> float:
    return statistics.fmean([one[name] for one in results if not one["diverged"]] or [float("inf")])


def megabytes_of(result: Result | None) -> float:
    """MB of a run; 0 if there is none."""
    return result["curve"]["bytes"][-1] / 1e6 if result and result["curve"] else 0.0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=("trials", "final", "table"), default="trials")
    parser.add_argument("--model", choices=tuple(PROBLEMS), default="small", help="what to train")
    add_options(parser, Path("benchmarks/frontier.json"))
    return checked(parser, words)


def add_options(parser: argparse.ArgumentParser, json: Path) -> None:
    """Add the options that all studies of stored runs have.

    Args:
        parser: The study's.
        json: The file of its results.
    """
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many")
    parser.add_argument(
        "--json",
        type=Path,
        default=json,
        help="file of the results; the tables (.md) are written beside it",
    )


def checked(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The options of a study, from these words or from the command line.

    Raises:
        ValueError: An option of `add_options` has a value that cannot work.
    """
    options = parser.parse_args(words)
    require(options.jobs >= 1, f"--jobs must be >= 1, got {options.jobs}")
    return options


def in_processes(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call a function in several processes at once and wait for all of them.

    They end when this process ends, even if it is killed.

    Args:
        count: How many processes.
        work: A function of a module.
        arguments: What each process calls it with.

    Raises:
        ValueError: One of the processes failed.
    """
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_work, args=(work, *arguments)) for _ in range(count)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    require(not any(job.exitcode for job in jobs), "a process failed; see above")


def _work(work: Callable[..., None], *arguments: Any) -> None:
    # By SystemExit, a run that is cut off removes its temporary folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(*arguments)


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, and then end this one."""
    parent = multiprocessing.parent_process()
    assert parent, "multiprocessing started this process"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"frontier: {error}")
