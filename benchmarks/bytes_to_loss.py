"""Measures how many bytes a method sends until it reaches data-parallel training's final loss.

    .venv/bin/python benchmarks/bytes_to_loss.py --stage tune     # then --stage final
    .venv/bin/python benchmarks/bytes_to_loss.py --stage all      # both; the default
    .venv/bin/python benchmarks/bytes_to_loss.py --stage table    # trains nothing

**The problem** is the same for all arms: a Llama of 133,440 parameters, bytes of the default
corpus, windows of 64, 16 samples per inner step over four workers, cosine learning rate, 3M tokens
(`--tokens`), 256 validation windows. `--section.key VALUE` changes it, for every arm. adloco begins
with two trainers of 8 samples each; the merged one has the 16 of both, and its norm test may only
let them grow, up to 64.

**Protocol.** Tuning uses a separate seed. It has three steps for each inner optimizer: (1) ddp's
learning rate on the grid `--inner-lr`; (2) DiLoCo in fp32 with that rate and H =
`--tune-sync-every`, on the grid `--outer-lr` x `--outer-momentum` (Nesterov; 0: plain SGD); (3)
DiLoCo's learning rate on the grid of (1), with the outer settings of (2). ddp runs with (1); all
other arms, every H and every wire format share (2) and (3); nothing is tuned for one of them
separately. local-sgd has no outer optimizer. Then `--stage final` runs every arm with the first
seed, then with the next, so the table grows evenly.

**What is counted.** Bytes are `bytes_communicated`: the payload of one worker's reductions with
others, in one direction, mean over workers. ddp is trained as one worker with the batch of all
four, which has the gradient of four workers that reduce at every step; its bytes are what these
would send, `bytes_ddp_equivalent` (4 bytes a parameter at each inner step), and its syncs the inner
steps. "Sent" is `bytes_sent`, what leaves a worker's link (a ring all-reduce of P bytes among W
workers: 2 (W - 1) / W P), where the records have it. Seconds are those of the rounds, without
evaluation and checkpoints, in one process without a network: they show what computing costs here,
not what a link would.

**Until.** An arm's curve is the mean over seeds of the loss as last evaluated, at each token count
at which a seed was evaluated (for arms with a constant batch these are the same for all seeds);
bytes, syncs and seconds are averaged the same way. A target is 1.00, 1.02 or 1.05 times the mean
final loss of ddp. It is reached at the first such point whose loss is <= the target; nothing is
interpolated. Evaluations are at ends of rounds, every 40 inner steps or so, so a target may have
been met up to one such interval earlier. The first table compares all arms with ddp with AdamW; a
further one compares each other inner optimizer with its own ddp. adloco's loss is that of its best
trainer; after its merge in round 3 it has one.

Every run is stored in the JSON file with its whole curve, under a key of its settings. Stored runs
are not repeated, so the program can be stopped at any time. The same command may be started twice
on one machine (with `--threads 1`): each run is done by one of the two.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from matplotlib.figure import Figure

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.errors import NonFiniteLossError, require
from adloco.metrics import Record
from adloco.run.training_run import TrainingRun

WORKERS, BATCH, EVALUATION_STEPS = 4, 16, 40
REPRODUCE = Path(__file__).parents[1] / "reproduce"
ADLOCO, DILOCO = str(REPRODUCE / "adloco.toml"), str(REPRODUCE / "diloco.toml")
PROBLEM = {
    "model.hidden_size": "64",
    "model.num_layers": "2",
    "model.num_heads": "4",
    "model.intermediate_size": "176",
    "data.tokenizer": "bytes",
    "data.context_tokens": "64",
    "evaluation.windows": "256",
    # All of a worker's samples in one micro-batch: there is enough memory.
    "switch.mode": "always",
    "switch.max_micro_batch": str(BATCH),
    "learning_rate.shape": "cosine",
    "run.precision": "fp32",
    "run.trackers": "none",
    "run.checkpoint_every": "1000000",
}
"""Flags of every arm. The folder and the number of threads are not here, because they do not change
the numbers.
"""
TUNING_SEED = 1000
FACTORS = (1.0, 1.02, 1.05)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method under comparison: a shipped recipe and its flags."""

    recipe: str
    flags: Mapping[str, str]
    has_outer: bool = True
    """True if it uses the shared outer learning rate and momentum."""
    data_parallel: bool = False
    """True if its one worker stands for four that reduce their gradients at every step."""


SPREAD = {
    "method.num_trainers": "1",
    "method.workers_per_trainer": str(WORKERS),
    "batch.initial": str(BATCH),
}
# That recipe has two trainers with two workers each, a norm test (eta = 1.5, up to 64
# samples a trainer) and a merge in round 3. Two things differ here: the merged trainer's batch is
# the sum of both, and batches only grow. So all arms begin with the same global batch, and none
# goes below it.
TRAINERS = {
    "method.num_trainers": "2",
    "method.workers_per_trainer": "2",
    "batch.initial": str(BATCH // 2),
    "batch.grow_only": "true",
    "merge.requested_batch": "sum",
    "wire.format": "fp32",
}


def topk(density: float, error_feedback: str = "0.9") -> dict[str, str]:
    return {
        "wire.format": "topk",
        "wire.density": str(density),
        "wire.error_feedback": error_feedback,
    }


STREAMING = {"streaming.fragments": "2", "streaming.tau": "5", "streaming.alpha": "0.5"}
ARMS = {
    "ddp": Arm(
        recipe="ddp", flags={"batch.initial": str(BATCH)}, has_outer=False, data_parallel=True
    ),
    "outer-alone": Arm(
        recipe=DILOCO, flags=SPREAD | {"method.workers_per_trainer": "1"}, data_parallel=True
    ),
    "local-sgd": Arm(recipe="local-sgd", flags=SPREAD, has_outer=False),
    "diloco": Arm(recipe=DILOCO, flags=SPREAD),
    "adloco": Arm(recipe=ADLOCO, flags=TRAINERS),
    **{
        f"diloco-{name}": Arm(recipe=DILOCO, flags=SPREAD | {"wire.format": name})
        for name in ("bf16", "int8", "int4", "int2")
    },
    "diloco-topk": Arm(recipe=DILOCO, flags=SPREAD | topk(1 / 16)),
    "diloco-topk-64": Arm(recipe=DILOCO, flags=SPREAD | topk(1 / 64)),
    # Residuals are in memory of their own, as is usual, to compare with residuals kept in the
    # parameters.
    "diloco-topk-64-behind": Arm(
        recipe=DILOCO, flags=SPREAD | topk(1 / 64, "0.95") | {"wire.residual_in_params": "false"}
    ),
    # One trainer from the start: the norm test alone.
    "norm-test": Arm(
        recipe=ADLOCO, flags=SPREAD | {"batch.minimum": str(BATCH), "merge.policy": "none"}
    ),
    "adloco-int4": Arm(recipe=ADLOCO, flags=TRAINERS | {"wire.format": "int4"}),
    "streaming": Arm(recipe=DILOCO, flags=SPREAD | STREAMING),
    "streaming-int4": Arm(recipe=DILOCO, flags=SPREAD | STREAMING | {"wire.format": "int4"}),
    "diloco-int1": Arm(recipe=DILOCO, flags=SPREAD | {"wire.format": "int1"}),
}
DEFAULT_ARMS = (
    "ddp",
    "local-sgd",
    "diloco",
    "adloco",
    "diloco-bf16",
    "diloco-int8",
    "diloco-int4",
    "diloco-int2",
    "diloco-topk",
)

Point = dict[str, float]
"""One evaluation: tokens, bytes, sent (if known), syncs, seconds and loss."""
Result = dict[str, Any]
"""A run in the JSON file: its settings, and its curve column by column."""
Watch = Callable[[TrainingRun, Record], Result]
"""(run, record of the round that ended) -> further entries of the result."""
Finish = Callable[[Sequence["Spec"]], list[Result]]
"""A function that returns the results of runs, in their order."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The settings of one run."""

    arm: str
    inner: str
    inner_lr: float
    seed: int
    tokens: int
    sync_every: int = EVALUATION_STEPS
    """H; for ddp only the interval between evaluations, in inner steps."""
    outer_lr: float = 1.0
    momentum: float = 0.0
    problem: tuple[tuple[str, str], ...] = ()
    """Flags that change the problem."""

    @property
    def flags(self) -> dict[str, str]:
        arm = ARMS[self.arm]
        options = f"{{ momentum = {self.momentum}, nesterov = true }}" if self.momentum else "{}"
        outer = {
            "outer.update": "optimizer",
            "outer.optimizer": "SGD",
            "outer.lr": str(self.outer_lr),
            "outer.options": options,
        }
        own = {
            "run.tokens": str(self.tokens),
            "run.seed": str(self.seed),
            "inner.optimizer": self.inner,
            "inner.lr": str(self.inner_lr),
            "method.sync_every": str(self.sync_every),
            "evaluation.every": str(max(1, round(EVALUATION_STEPS / self.sync_every))),
        }
        return (
            PROBLEM | own | (outer if arm.has_outer else {}) | dict(arm.flags) | dict(self.problem)
        )

    @property
    def key(self) -> str:
        """A digest of all settings, those of the recipe's file included."""
        values = override(read_values(ARMS[self.arm].recipe), list(self.flags.items()))
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[
            :16
        ]

    def recipe(self, **more: str) -> Recipe:
        """The run's recipe, with more settings as section_key = value.

        Raises:
            ValueError: This version of adloco refuses a flag of the arm.
        """
        flags = self.flags | {name.replace("_", ".", 1): value for name, value in more.items()}
        try:
            return build_recipe(override(read_values(ARMS[self.arm].recipe), list(flags.items())))
        except ValueError as error:
            raise ValueError(f"this version refuses arm {self.arm!r}: {error}") from error

    def __str__(self) -> str:
        outer = f", outer {self.outer_lr:g} / {self.momentum:g}" if ARMS[self.arm].has_outer else ""
        interval = f", H {self.sync_every}" if self.arm != "ddp" else ""
        return f"{self.arm}, {self.inner} {self.inner_lr:g}{interval}{outer}, seed {self.seed}"


def train(spec: Spec, threads: int, watch: Watch | None = None) -> Result:
    """Train in this process, in a temporary run folder. Divergence is a result; every other failure
    is an error. What `watch` returns after each round is added to the result.
    """
    points: list[Point] = []
    parallel, more = ARMS[spec.arm].data_parallel, {}
    seconds, tokens, diverged = 0.0, 0, ""
    with (
        tempfile.TemporaryDirectory(prefix="adloco-bytes-to-loss-") as folder,
        torch_threads(threads),
    ):
        run = TrainingRun.create(spec.recipe(run_folder=f"{folder}/run", run_threads=str(threads)))
        try:
            for record in run.rounds():
                seconds += (record["tokens"] - tokens) / record["tokens_per_second"]
                tokens = record["tokens"]
                if watch:
                    more |= watch(run, record)
                if record["val_loss"] is not None:
                    points.append(point(record, seconds, data_parallel=parallel))
        except NonFiniteLossError as error:
            diverged = str(error)
        environment = json.loads(Path(folder, "run", "environment.json").read_text())
    about = {
        "arm": spec.arm,
        "inner": spec.inner,
        "sync_every": spec.sync_every,
        "seed": spec.seed,
        "flags": spec.flags,
    }
    where = {
        "git": environment["git"],
        "torch": environment["versions"]["torch"],
        "threads": threads,
        "parameters": run.algorithm.num_parameters,
    }
    curve = {name: [each[name] for each in points] for name in (points[0] if points else {})}
    return (
        about
        | where
        | {
            "diverged": diverged,
            "final_loss": None if diverged else points[-1]["loss"],
            "curve": curve,
        }
        | more
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, with which a run of a single worker computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def point(record: Mapping[str, Any], seconds: float, *, data_parallel: bool) -> Point:
    """The point of the curve from a line of metrics.jsonl.

    Args:
        record: The line, of a round that was evaluated.
        seconds: Of training so far.
        data_parallel: Count what four workers would send in data-parallel training, at every inner
            step.
    """
    handed = record["bytes_ddp_equivalent" if data_parallel else "bytes_communicated"]
    sent = 2 * (WORKERS - 1) / WORKERS * handed if data_parallel else record.get("bytes_sent")
    counted = {
        "tokens": record["tokens"],
        "bytes": round(handed),
        "syncs": record["inner_steps" if data_parallel else "syncs"],
    }
    return (
        counted
        | ({} if sent is None else {"sent": round(sent)})
        | {"seconds": round(seconds, 2), "loss": round(record["val_loss"], 5)}
    )


class Store:
    """The runs in a JSON file, one per line. Several processes may add to it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[str, Result]:
        """All runs by key."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def add(self, key: str, result: Result) -> None:
        with self._lock("file"):
            runs = self.read() | {key: result}
            lines = ",\n".join(
                f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}"
                for name, run in runs.items()
            )
            temporary = self.file.with_name(f".{self.file.name}")
            temporary.write_text(f"{{\n{lines}\n}}\n")
            temporary.replace(self.file)

    @contextmanager
    def claim(self, key: str, *, wait: bool) -> Iterator[bool]:
        """Try to reserve a run for this process while the context lasts; yield True on success.

        Args:
            key: The run's key.
            wait: Wait until no other process has reserved it.
        """
        lock = self._lock(key)
        try:
            lock.acquire(blocking=wait)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _lock(self, name: str) -> FileLock:
        folder = Path(tempfile.gettempdir(), f"adloco-locks-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        return FileLock(
            folder / hashlib.sha256(f"{self.file.resolve()} {name}".encode()).hexdigest()
        )

    def stored(self, specs: Sequence[Spec]) -> list[Result]:
        """The results of these runs; ValueError if one is missing."""
        runs = self.read()
        missing = [spec for spec in specs if spec.key not in runs]
        require(
            not missing,
            f"{len(missing)} tuning runs are not in {self.file}, for instance: "
            f"{missing[0] if missing else ''}; run --stage tune first",
        )
        return [runs[spec.key] for spec in specs]


class OutOfTimeError(Exception):
    """The time limit has passed, so no further run is started."""


def finish(
    specs: Sequence[Spec],
    store: Store,
    threads: int,
    deadline: float,
    train: Callable[[Spec, int], Result] = train,
) -> list[Result]:
    """Train the runs that are missing and return the results of all.

    The first pass skips runs that another process has reserved; the second waits for them.

    Args:
        specs: The runs.
        store: Where results are stored.
        threads: Torch's threads for each run.
        deadline: In seconds of time.monotonic(); no run is started after it.
        train: Trains a run with so many threads.

    Raises:
        OutOfTimeError: The deadline passed before all runs were started.
    """
    for wait in (False, True):
        for index, spec in enumerate(specs):
            if spec.key in store.read():
                continue
            if time.monotonic() > deadline:
                raise OutOfTimeError
            with store.claim(spec.key, wait=wait) as mine:
                if mine and spec.key not in store.read():
                    began = time.monotonic()
                    result = train(spec, threads)
                    store.add(spec.key, result)
                    told = (
                        f"loss {result['final_loss']:.4f}"
                        if result["final_loss"] is not None
                        else result["diverged"]
                    )
                    print(
                        f"[{index + 1}/{len(specs)}] {spec}: {told} "
                        f"({time.monotonic() - began:.0f} s)",
                        flush=True,
                    )
    return store.stored(specs)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that tuning chose for one inner optimizer, and the losses of all tuning runs."""

    ddp_lr: float
    inner_lr: float
    outer_lr: float
    momentum: float
    losses: tuple[tuple[str, float], ...]


def tune(options: argparse.Namespace, inner: str, finish: Finish) -> Tuned:
    """Steps 1 to 3 of the protocol."""
    losses: list[tuple[str, float]] = []

    def best(specs: Sequence[Spec]) -> Spec:
        found = [
            math.inf if result["final_loss"] is None else result["final_loss"]
            for result in finish(specs)
        ]
        losses.extend(zip(map(str, specs), found, strict=True))
        require(
            min(found) < math.inf,
            f"all of the tuning runs diverged, for instance {specs[0]}; lower --inner-lr",
        )
        return specs[found.index(min(found))]

    common = {
        "inner": inner,
        "seed": TUNING_SEED,
        "tokens": options.tune_tokens or options.tokens,
        "problem": options.problem,
    }
    ddp = best([Spec(arm="ddp", inner_lr=rate, **common) for rate in options.inner_lr])
    start = replace(ddp, arm="diloco", sync_every=options.tune_sync_every)
    outer = best(
        [
            replace(start, outer_lr=rate, momentum=momentum)
            for rate in options.outer_lr
            for momentum in options.outer_momentum
        ]
    )
    chosen = best([replace(outer, inner_lr=rate) for rate in options.inner_lr])
    return Tuned(
        ddp_lr=ddp.inner_lr,
        inner_lr=chosen.inner_lr,
        outer_lr=chosen.outer_lr,
        momentum=chosen.momentum,
        losses=tuple(dict(losses).items()),
    )


def final_specs(options: argparse.Namespace, tuned: Mapping[str, Tuned]) -> list[Spec]:
    """The runs of every arm, inner optimizer, H and seed."""
    specs = []
    for seed in options.seeds:
        for inner, choice in tuned.items():
            common = {
                "inner": inner,
                "seed": seed,
                "tokens": options.tokens,
                "problem": options.problem,
            }
            for arm in options.arms:
                if arm == "ddp":
                    specs.append(Spec(arm=arm, inner_lr=choice.ddp_lr, **common))
                    continue
                shared = {
                    "inner_lr": choice.inner_lr,
                    "outer_lr": choice.outer_lr,
                    "momentum": choice.momentum,
                } | common
                specs += [
                    Spec(arm=arm, sync_every=sync_every, **shared)
                    for sync_every in options.sync_every
                ]
    return specs


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm with one inner optimizer and one H, over its seeds."""

    arm: str
    inner: str
    sync_every: int
    """1 for ddp."""
    curves: list[list[Point]]
    """The curve of each seed that did not diverge."""
    diverged: int
    """Number of seeds that diverged."""

    @property
    def finals(self) -> list[float]:
        return [curve[-1]["loss"] for curve in self.curves]

    @property
    def mean(self) -> list[Point]:
        return mean_curve(self.curves)


def rows_of(specs: Sequence[Spec], runs: Mapping[str, Result]) -> list[Row]:
    """The table's rows from those of these runs that are stored, in their order."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for spec in specs:
        if spec.key in runs:
            groups.setdefault(
                (spec.arm, spec.inner, 1 if spec.arm == "ddp" else spec.sync_every), []
            ).append(runs[spec.key])
    return [
        Row(
            arm=arm,
            inner=inner,
            sync_every=sync_every,
            curves=[points_of(run["curve"]) for run in results if not run["diverged"]],
            diverged=sum(bool(run["diverged"]) for run in results),
        )
        for (arm, inner, sync_every), results in groups.items()
    ]


def points_of(curve: Mapping[str, Sequence[float]]) -> list[Point]:
    """Turn the columns of a stored curve into points."""
    return [dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at every token count of any of them, from where all have a point.

    Each curve contributes its latest evaluation up to that token count.
    """
    if not curves:
        return []
    result = []
    for tokens in sorted({each["tokens"] for curve in curves for each in curve}):
        last = [
            max(
                (each for each in curve if each["tokens"] <= tokens),
                key=lambda each: each["tokens"],
                default=None,
            )
            for curve in curves
        ]
        known = [each for each in last if each is not None]
        if len(known) == len(curves):
            names = [name for name in known[0] if all(name in each for each in known)]
            result.append(
                {name: statistics.fmean(each[name] for each in known) for name in names}
                | {"tokens": tokens}
            )
    return result


def crossing(curve: Sequence[Point], target: float) -> Point | None:
    """The first point whose loss is at or below the target."""
    return next((each for each in curve if each["loss"] <= target), None)


def tables(rows: Sequence[Row], tuned: Mapping[str, Tuned], options: argparse.Namespace) -> str:
    """The results as Markdown: a table that compares all arms with ddp with AdamW, one for each
    other inner optimizer with its own ddp, and the tuning runs.
    """
    text = [
        f"# Bytes until data-parallel training's loss, {options.tokens / 1e6:g}M tokens",
        "\n\n".join(__doc__.split("\n\n")[2:-1]),
    ]
    if options.problem:
        text.append(
            "The problem was changed by "
            f"{', '.join(f'`--{name} {value}`' for name, value in options.problem)}."
        )
    baselines = {row.inner: row for row in rows if row.arm == "ddp" and row.curves}
    for inner, ddp in sorted(baselines.items(), key=lambda item: item[0] != "adamw"):
        shown = [row for row in rows if inner == "adamw" or row.inner == inner]
        text += [
            f"## Against ddp with {inner}, which ends at {statistics.fmean(ddp.finals):.4f}",
            table(shown, ddp),
        ]
    return "\n\n".join([*text, "## Tuning", *tuning_text(tuned, options)]) + "\n"


def tuning_text(tuned: Mapping[str, Tuned], options: argparse.Namespace) -> list[str]:
    """Paragraphs that say what tuning chose, and from which losses."""
    text = []
    for inner, choice in tuned.items():
        tokens = f"{(options.tune_tokens or options.tokens) / 1e6:g}M tokens"
        outer = f"outer learning rate {choice.outer_lr:g}, momentum {choice.momentum:g}"
        at_edge = {choice.ddp_lr, choice.inner_lr} & {min(options.inner_lr), max(options.inner_lr)}
        warning = (
            f" {max(at_edge):g} is at the edge of the grid: a wider one may have better rates."
            if at_edge
            else ""
        )
        text.append(
            f"{inner}, on {tokens}: ddp with {choice.ddp_lr:g}; "
            f"all others with {choice.inner_lr:g}, {outer}.{warning}"
        )
        text.append(
            "| run | final loss |\n|---|---|\n"
            + "\n".join(f"| {name} | {loss:.4f} |" for name, loss in choice.losses)
        )
    return text


def provenance(results: Sequence[Result]) -> str:
    """One line with the commits, torch versions and threads of the runs."""
    code = {
        f"{git['commit'][:7]}{' (changed)' if git['dirty'] else ''}"
        if (git := result["git"])
        else "unknown"
        for result in results
    }
    versions, threads = (
        {result["torch"] for result in results},
        {str(result["threads"]) for result in results},
    )
    return (
        f"\n{len(results)} runs of commit {', '.join(sorted(code))}; "
        f"torch {', '.join(sorted(versions))}; threads: {', '.join(sorted(threads))}.\n"
    )


def table(rows: Sequence[Row], ddp: Row) -> str:
    targets = [factor * statistics.fmean(ddp.finals) for factor in FACTORS]
    heads = ["arm", "inner", "H", "seeds", "final loss (lowest to highest)", "MB in all", "MB sent"]
    heads += [
        f"tokens / MB / syncs / s until {target:.4f} ({factor:.2f}x)"
        for factor, target in zip(FACTORS, targets, strict=True)
    ]
    heads += [
        "ddp's MB over the arm's, in all",
        *(f"both until {factor:.2f}x" for factor in FACTORS),
        "MB sent, both until 1.00x",
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        seeds = f"{len(row.curves)}" + (f" ({row.diverged} diverged)" if row.diverged else "")
        about = [row.arm, row.inner, str(row.sync_every), seeds]
        if not row.curves:
            lines.append([*about, "diverged", *["-"] * (len(heads) - 5)])
            continue
        mean, ends = row.mean, ddp.mean
        final = (
            f"{statistics.fmean(row.finals):.4f} ({min(row.finals):.4f} to {max(row.finals):.4f})"
        )
        about += [
            final,
            megabytes(mean[-1]["bytes"]),
            megabytes(mean[-1]["sent"]) if "sent" in mean[-1] else "-",
        ]
        reached = [crossing(mean, target) for target in targets]
        lowest = f"not reached (best {min(each['loss'] for each in mean):.4f})"
        cells = [
            f"{at['tokens'] / 1e6:.2f}M / {megabytes(at['bytes'])} / "
            f"{at['syncs']:,.0f} / {at['seconds']:.0f}"
            if at
            else lowest
            for at in reached
        ]
        ratios = [
            fewer(ends[-1], mean[-1]),
            *(
                fewer(crossing(ends, target), at)
                for target, at in zip(targets, reached, strict=True)
            ),
        ]
        ratios.append(fewer(crossing(ends, targets[0]), reached[0], "sent"))
        lines.append([*about, *cells, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}" if count >= 1e7 else f"{count / 1e6:.2f}"


def fewer(ddp: Point | None, arm: Point | None, counted: str = "bytes") -> str:
    """ddp's bytes divided by the arm's, as text; `-` if one is missing."""
    return f"{ddp[counted] / arm[counted]:.1f}x" if ddp and arm and arm.get(counted) else "-"


COLOURS = (
    "#111111",
    "#2e8b57",
    "#0b6e99",
    "#d9730d",
    "#7b4fb5",
    "#c2255c",
    "#b8860b",
    "#17a2a2",
    "#8c564b",
    "#6b7280",
    "#4c6ef5",
    "#e377c2",
    "#0a4d2e",
    "#a05195",
    "#ff6f00",
    "#9c6644",
    "#2f9e44",
)
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (6, 2, 1, 2, 1, 2)), "v"))


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw loss against bytes, and below it the final loss against all bytes, with a column for
    each inner optimizer and a colour for each arm.
    """
    rows = [row for row in rows if row.curves]
    inners = list(dict.fromkeys(row.inner for row in rows)) or ["adamw"]
    figure = Figure(figsize=(7.5 * len(inners), 11), layout="constrained")
    axes = figure.subplots(2, len(inners), squeeze=False)
    colours = dict(zip(ARMS, COLOURS, strict=True))
    intervals = sorted({row.sync_every for row in rows if row.arm != "ddp"})
    styles = {1: STYLES[0]} | {
        interval: STYLES[index % len(STYLES)] for index, interval in enumerate(intervals)
    }
    for column, inner in enumerate(inners):
        for row in [row for row in rows if row.inner == inner]:
            draw_row(
                row, axes[0, column], axes[1, column], colours[row.arm], *styles[row.sync_every]
            )
        label_axes(axes[0, column], axes[1, column], rows, inner)
    for arm in dict.fromkeys(row.arm for row in rows):
        figure.axes[0].plot([], [], color=colours[arm], linewidth=3, label=arm)
    for interval in intervals:
        line, marker = styles[interval]
        figure.axes[0].plot(
            [], [], color="#444444", linestyle=line, marker=marker, label=f"H = {interval}"
        )
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(file, dpi=110)


def draw_row(row: Row, curves: Any, frontier: Any, colour: str, line: str, marker: str) -> None:
    mean = row.mean
    for curve in row.curves:
        curves.plot(
            [each["bytes"] / 1e6 for each in curve],
            [each["loss"] for each in curve],
            color=colour,
            linewidth=0.5,
            alpha=0.25,
        )
    curves.plot(
        [each["bytes"] / 1e6 for each in mean],
        [each["loss"] for each in mean],
        color=colour,
        linestyle=line,
        linewidth=1.4,
    )
    end = mean[-1]
    spread = [[end["loss"] - min(row.finals)], [max(row.finals) - end["loss"]]]
    frontier.errorbar(
        end["bytes"] / 1e6,
        end["loss"],
        yerr=spread,
        fmt=marker,
        color=colour,
        markersize=6,
        capsize=2,
        linewidth=0.8,
        alpha=0.85,
    )


def label_axes(curves: Any, frontier: Any, rows: Sequence[Row], inner: str) -> None:
    finals = [final for row in rows if row.inner == inner for final in row.finals]
    targets = {row.inner: statistics.fmean(row.finals) for row in rows if row.arm == "ddp"}
    own = targets.get(inner)
    lines = {f"ddp x {factor:.2f}": factor * own for factor in FACTORS} if own else {}
    if inner != "adamw" and "adamw" in targets:
        lines["ddp adamw"] = targets["adamw"]
    low, high = min([*finals, *lines.values()]), max([*finals, *lines.values()])
    # Cuts off the first steps, where all curves fall from the same height.
    curves.set_ylim(low - 0.1 * (high - low), low + 3 * (high - low))
    for axis, about in (
        (curves, "has reduced with others so far"),
        (frontier, "reduces with others in the whole run"),
    ):
        for name, loss in lines.items():
            axis.axhline(
                loss,
                color="#444444",
                linewidth=0.7,
                linestyle="-" if name.endswith("1.00") else (0, (4, 4)),
            )
            axis.annotate(
                name,
                (1.01, loss),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                color="#444444",
                annotation_clip=False,
            )
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel(f"MB that a worker {about}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    curves.set_title(f"inner optimizer {inner}")
    curves.set_ylabel("validation loss, nats per byte (thin: each seed)")
    frontier.set_ylabel("final validation loss (bars: lowest and highest seed)")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=("tune", "final", "all", "table"), default="all")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=DEFAULT_ARMS,
        metavar="ARM",
        help=f"arms to run: {', '.join(ARMS)}",
    )
    parser.add_argument("--inner", nargs="+", choices=("adamw", "muon"), default=("adamw", "muon"))
    parser.add_argument(
        "--sync-every",
        nargs="+",
        type=int,
        default=(20, 50, 100),
        help="values of H, for all arms but ddp",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--inner-lr", nargs="+", type=float, default=(2e-3, 4e-3, 8e-3, 1.6e-2))
    parser.add_argument("--outer-lr", nargs="+", type=float, default=(0.7, 1.0))
    parser.add_argument("--outer-momentum", nargs="+", type=float, default=(0.0, 0.6, 0.9))
    parser.add_argument("--tune-sync-every", type=int, default=50)
    parser.add_argument("--tune-tokens", type=int, default=0, help="0: as many as --tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--limit-minutes", type=float, default=math.inf, help="start no run after this many minutes"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("benchmarks/bytes_to_loss.json"),
        help="file of the results; the table (.md) and the plot (.png) are written beside it",
    )
    options, rest = parser.parse_known_args(words)
    if len(rest) % 2 or not all(name.startswith("--") and "." in name for name in rest[::2]):
        parser.error(f"expected --section.key VALUE, got {' '.join(rest)}")
    options.problem = tuple(
        (name.removeprefix("--"), value) for name, value in zip(rest[::2], rest[1::2], strict=True)
    )
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    store, deadline = Store(options.json), time.monotonic() + 60 * options.limit_minutes

    def run(specs: Sequence[Spec]) -> list[Result]:
        return finish(specs, store, options.threads, deadline)

    if options.stage != "table":
        # An arm that this version refuses must fail now, not after hours of other runs.
        for arm in options.arms:
            Spec(
                arm=arm,
                inner=options.inner[0],
                inner_lr=1e-3,
                seed=0,
                tokens=options.tokens,
                problem=options.problem,
            ).recipe()
    tuned: dict[str, Tuned] = {}
    try:
        tuned = {
            inner: tune(options, inner, run if options.stage in ("tune", "all") else store.stored)
            for inner in options.inner
        }
        if options.stage in ("final", "all"):
            run(final_specs(options, tuned))
    except OutOfTimeError:
        print("out of time; the same command continues from here", flush=True)
    if tuned and options.stage == "tune":
        print("\n\n".join(tuning_text(tuned, options)))
    elif tuned:
        specs, runs = final_specs(options, tuned), store.read()
        rows = rows_of(specs, runs)
        text = tables(rows, tuned, options) + provenance(
            [runs[spec.key] for spec in specs if spec.key in runs]
        )
        options.json.with_suffix(".md").write_text(text)
        draw(rows, options.json.with_suffix(".png"))
        print(text)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"bytes_to_loss: {error}")
