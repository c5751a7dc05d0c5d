"""Runs of one small problem, each trained once and kept in a JSON file with its whole curve.

`bytes_to_loss.py`, `frontier.py` and `studies.py` choose the runs and make the
tables; this module trains what is missing. A run is found by a key of its settings, so a study can
be stopped at any time, and several processes, also of the same command started twice, share its
work. The text of a study's page (its problem, protocol and numbers) stands in the page itself,
NAME.md beside the script; the tables below it are replaced.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.errors import NonFiniteLossError, require
from adloco.metrics import Record
from adloco.run.training_run import TrainingRun

WORKERS, BATCH, EVALUATION_STEPS, TUNING_SEED = 4, 16, 40, 1000
REPRODUCE = Path(__file__).parents[1] / "reproduce"

GONE = ("batch.smoothing",)
"""Flags of stored runs that no version has any more."""
STORED_AS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "wire.feedback": ("wire.residual_in_params", {"memory": "false", "params": "true"}),
    "wire.feedback_decay": ("wire.error_feedback", {}),
}
"""Flags that stored runs and keys have under another name, and perhaps with other values."""
Result = dict[str, Any]
"""A run in the JSON file: its settings, and its curve column by column."""
Watch = Callable[[TrainingRun, Record], Result]
"""(run, record of the round that ended) -> further entries of the result."""


def flags_of(text: str) -> dict[str, str]:
    """Settings from `section.key=value` separated by blanks."""
    return dict(word.split("=", 1) for word in text.split())


# The folder and the number of threads are not here, because they do not change the numbers. All of
# a worker's samples are in one micro-batch: there is enough memory.
PROBLEM = flags_of(
    "model.hidden_size=64 model.num_layers=2 model.num_heads=4 model.intermediate_size=176 "
    "data.tokenizer=bytes data.context_tokens=64 evaluation.windows=256 "
    f"switch.mode=always switch.max_micro_batch={BATCH} learning_rate.shape=cosine "
    "run.precision=fp32 run.trackers=none run.checkpoint_every=1000000"
)
"""Flags of every run, unless its arm or problem changes them."""
SPREAD = f"method.num_trainers=1 method.workers_per_trainer={WORKERS} batch.initial={BATCH}"
# The recipe has two trainers with two workers each, a norm test (eta = 1.5, up to 64 samples a
# trainer) and a merge in round 3. Two things differ here: the merged trainer's batch is the sum of
# both, and batches only grow. So all arms begin with the same global batch, and none goes below it.
TRAINERS = (
    f"method.num_trainers=2 method.workers_per_trainer=2 batch.initial={BATCH // 2} "
    "batch.grow_only=true merge.requested_batch=sum wire.format=fp32"
)
STREAMING = f"{SPREAD} streaming.fragments=2 streaming.tau=5 streaming.alpha=0.5"
TOPK = f"{SPREAD} wire.format=topk"
ADLOCO, DILOCO = (str(REPRODUCE / f"{name}.toml") for name in ("adloco", "diloco"))
FORMATS = ("bf16", "int8", "int4", "int2", "int1")
ARMS = {
    "ddp": ("ddp", f"batch.initial={BATCH}"),
    "outer-alone": (DILOCO, f"{SPREAD} method.workers_per_trainer=1"),
    "local-sgd": ("local-sgd", SPREAD),
    "diloco": (DILOCO, SPREAD),
    "adloco": (ADLOCO, TRAINERS),
    **{f"diloco-{name}": (DILOCO, f"{SPREAD} wire.format={name}") for name in FORMATS},
    "diloco-topk": (DILOCO, f"{TOPK} wire.density={1 / 16} wire.feedback_decay=0.9"),
    "diloco-topk-64": (DILOCO, f"{TOPK} wire.density={1 / 64} wire.feedback_decay=0.9"),
    # Residuals are in memory of their own, as is usual, not in the parameters.
    "diloco-topk-64-behind": (
        DILOCO,
        f"{TOPK} wire.density={1 / 64} wire.feedback_decay=0.95 wire.feedback=memory",
    ),
    # One trainer from the start: the norm test alone.
    "norm-test": (ADLOCO, f"{SPREAD} batch.minimum={BATCH} merge.policy=none"),
    "adloco-int4": (ADLOCO, f"{TRAINERS} wire.format=int4"),
    "streaming": (DILOCO, STREAMING),
    "streaming-int4": (DILOCO, f"{STREAMING} wire.format=int4"),
}
"""Methods under comparison: the recipe and the flags of each."""
WITHOUT_OUTER = ("ddp", "local-sgd")
"""Arms without an outer learning rate and momentum."""
DATA_PARALLEL = ("ddp", "outer-alone")
"""Arms whose one worker stands for four that reduce their gradients at every step."""


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
        options = f"{{ momentum = {self.momentum}, nesterov = true }}" if self.momentum else "{}"
        outer = flags_of(f"outer.update=optimizer outer.optimizer=SGD outer.lr={self.outer_lr}")
        own = flags_of(
            f"run.tokens={self.tokens} run.seed={self.seed} inner.optimizer={self.inner} "
            f"inner.lr={self.inner_lr} method.sync_every={self.sync_every} "
            f"evaluation.every={max(1, round(EVALUATION_STEPS / self.sync_every))}"
        )
        if self.arm not in WITHOUT_OUTER:
            own |= outer | {"outer.options": options}
        return PROBLEM | own | flags_of(ARMS[self.arm][1]) | dict(self.problem)

    @property
    def key(self) -> str:
        """A digest of all settings, those of the recipe's file included."""
        values = override(read_values(ARMS[self.arm][0]), [*as_stored(self.flags).items()])
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def recipe(self, **more: str) -> Recipe:
        """The run's recipe, with more settings as section_key = value.

        Raises:
            ValueError: This version of adloco refuses a flag of the arm.
        """
        try:
            named = {name.replace("_", ".", 1): value for name, value in more.items()}
            flags = [*self.flags.items(), *named.items()]
            return build_recipe(override(read_values(ARMS[self.arm][0]), flags))
        except ValueError as error:
            raise ValueError(f"this version refuses arm {self.arm!r}: {error}") from error

    def __str__(self) -> str:
        outer = f", outer {self.outer_lr:g} / {self.momentum:g}"
        outer = "" if self.arm in WITHOUT_OUTER else outer
        interval = f", H {self.sync_every}" if self.arm != "ddp" else ""
        return f"{self.arm}, {self.inner} {self.inner_lr:g}{interval}{outer}, seed {self.seed}"


def train(spec: Spec, threads: int, watch: Watch | None = None) -> Result:
    """Train in this process, in a temporary run folder. Divergence is a result; every other failure
    is an error. What `watch` returns after each round is added to the result.
    """
    more: Result = {}
    curve: dict[str, list[float]] = {}
    parallel = spec.arm in DATA_PARALLEL
    seconds, tokens, diverged = 0.0, 0, ""
    torch.set_num_threads(threads)  # With which a run of a single worker computes.
    with tempfile.TemporaryDirectory(prefix="adloco-stored-runs-") as folder:
        run = TrainingRun.create(spec.recipe(run_folder=f"{folder}/run", run_threads=str(threads)))
        try:
            for record in run.rounds():
                seconds += (record["tokens"] - tokens) / record["tokens_per_second"]
                tokens = record["tokens"]
                if watch:
                    more |= watch(run, record)
                if record["val_loss"] is not None:
                    for name, value in point(record, seconds, parallel).items():
                        curve.setdefault(name, []).append(value)
        except NonFiniteLossError as error:
            diverged = str(error)
        environment = json.loads(Path(folder, "run", "environment.json").read_text())
    return {
        "arm": spec.arm,
        "inner": spec.inner,
        "sync_every": spec.sync_every,
        "seed": spec.seed,
        "flags": spec.flags,
        "git": environment["git"],
        "torch": environment["versions"]["torch"],
        "threads": threads,
        "parameters": run.algorithm.num_parameters,
        "diverged": diverged,
        "final_loss": None if diverged else curve["loss"][-1],
        "curve": curve,
        **more,
    }


def point(record: Mapping[str, Any], seconds: float, data_parallel: bool) -> dict[str, float]:
    """The point of a curve from a line of metrics.jsonl.

    Args:
        record: The line, of a round that was evaluated.
        seconds: Of training so far.
        data_parallel: Count what four workers would send in data-parallel training, at every inner
            step.
    """
    handed = record["bytes_ddp_equivalent" if data_parallel else "bytes_communicated"]
    sent = 2 * (WORKERS - 1) / WORKERS * handed if data_parallel else record.get("bytes_sent")
    return {
        "tokens": record["tokens"],
        "bytes": round(handed),
        "syncs": record["inner_steps" if data_parallel else "syncs"],
        **({} if sent is None else {"sent": round(sent)}),
        "seconds": round(seconds, 2),
        "loss": round(record["val_loss"], 5),
    }


class Store:
    """The runs in a JSON file, one per line. Several processes may add to it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[str, Result]:
        """All runs by key."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def add(self, key: str, result: Result) -> None:
        with self.lock("file"):
            runs = self.read() | {key: result}
            lines = ",\n".join(
                f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}"
                for name, run in runs.items()
            )
            temporary = self.file.with_name(f".{self.file.name}")
            temporary.write_text(f"{{\n{lines}\n}}\n")
            temporary.replace(self.file)

    def of(self, specs: Sequence[Spec]) -> list[Result]:
        """The results of these runs; ValueError if one is missing."""
        runs = self.read()
        missing = [spec for spec in specs if spec.key not in runs]
        require(
            not missing,
            f"{len(missing)} tuning runs are not in {self.file}, for instance: "
            f"{missing[0] if missing else ''}; run --stage tune first",
        )
        return [runs[spec.key] for spec in specs]

    def lock(self, name: str) -> FileLock:
        """A lock between processes: of the file, or of a run that only one of them shall train."""
        folder = Path(tempfile.gettempdir(), f"adloco-locks-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        return FileLock(
            folder / hashlib.sha256(f"{self.file.resolve()} {name}".encode()).hexdigest()
        )


def stored(specs: Iterable[Spec], runs: Mapping[str, Result]) -> dict[Spec, Result]:
    """Those of these runs that are stored. A run whose recipe file has changed since is found by
    its flags, so that tables keep it until it is trained again; the page's last line names commits.
    """
    by_flags = {_flags(run["arm"], run["flags"]): run for run in runs.values() if "flags" in run}
    found = (
        (spec, runs.get(spec.key) or by_flags.get(_flags(spec.arm, spec.flags))) for spec in specs
    )
    return {spec: run for spec, run in found if run}


def _flags(arm: str, flags: Mapping[str, str]) -> tuple[object, ...]:
    return (arm, *sorted(item for item in as_stored(flags).items() if item[0] not in GONE))


def as_stored(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags by the names of stored runs; those that have these names already stay as they are."""
    renamed = ((STORED_AS.get(name, (name, {})), value) for name, value in flags.items())
    return {name: values.get(value, value) for (name, values), value in renamed}


class OutOfTimeError(Exception):
    """The time limit has passed, so no further run is started."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains the runs that nobody has stored or begun."""

    store: Store
    deadline: float = math.inf
    """In seconds of time.monotonic(); no run is started after it."""
    threads: int = 1
    watch: Callable[[], Watch | None] = lambda: None
    """() -> what watches one run."""

    def __call__(self, specs: Sequence[Spec]) -> list[Result]:
        """The results of these runs, in their order.

        Raises:
            OutOfTimeError: The deadline passed before all runs were started.
        """
        # First without the runs that another process trains; then these are waited for.
        for timeout in (0, -1):
            for number, spec in enumerate(specs, 1):
                if spec.key in self.store.read():
                    continue
                if time.monotonic() > self.deadline:
                    raise OutOfTimeError
                with suppress(Timeout), self.store.lock(spec.key).acquire(timeout):
                    if spec.key not in self.store.read():
                        self._train(spec, f"[{number}/{len(specs)}]")
        return self.store.of(specs)

    def _train(self, spec: Spec, number: str) -> None:
        began = time.monotonic()
        result = train(spec, self.threads, self.watch())
        self.store.add(spec.key, result)
        loss = result["final_loss"]
        told = result["diverged"] if loss is None else f"loss {loss:.4f}"
        print(f"{number} {spec}: {told} ({time.monotonic() - began:.0f} s)", flush=True)


def study_parser(doc: str, file: Path) -> argparse.ArgumentParser:
    """A parser with the options that all studies have.

    Args:
        doc: The study's description.
        file: Its results, unless --json names another file.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", type=int, default=2, help="runs at once, each on one core (default: 2)")
    add("--minutes", type=float, default=math.inf, help="start no run after so many")
    add("--json", type=Path, default=file, help="file of the results; tables are written beside it")
    return parser


def in_processes(options: argparse.Namespace, work: Callable[..., None]) -> None:
    """Call work(options, deadline) in --jobs processes at once, and wait for all of them; a single
    one is this process.

    They end when this process ends, even if it is killed.

    Raises:
        ValueError: --jobs cannot work, or one of the processes failed.
    """
    require(options.jobs >= 1, f"--jobs must be >= 1, got {options.jobs}")
    arguments = (work, options, time.monotonic() + 60 * options.minutes)
    if options.jobs == 1:
        _in_time(*arguments)
        return
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_child, args=arguments) for _ in range(options.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    require(not any(job.exitcode for job in jobs), "a process failed; see above")


def _in_time(work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(*arguments)
    except OutOfTimeError:
        print("out of time; the same command continues from here", flush=True)


def _child(*arguments: Any) -> None:
    # By SystemExit, a run that is cut off removes its temporary folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _in_time(*arguments)
    except ValueError as error:
        sys.exit(str(error))


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, and then end this one."""
    parent = multiprocessing.parent_process()
    assert parent, "multiprocessing started this process"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def write_page(file: Path, name: str, tables: Iterable[str], known: Sequence[Result]) -> None:
    """Print the page of a study, and write it beside its results.

    Args:
        file: The results.
        name: The study's, whose page here has the text above the tables.
        tables: What follows the text.
        known: The runs in them, whose commits, torch versions and threads the last line names.
    """
    about = re.split(r"\n\n(?=## |\| )", Path(__file__).with_name(f"{name}.md").read_text())[0]
    code = {
        f"{git['commit'][:7]}{' (changed)' if git['dirty'] else ''}" if git else "unknown"
        for git in (run["git"] for run in known)
    }
    versions, threads = (
        ", ".join(sorted({str(run[name]) for run in known})) for name in ("torch", "threads")
    )
    last = f"{len(known)} runs of commit {', '.join(sorted(code))}"
    text = "\n\n".join([about, *tables, f"{last}; torch {versions}; threads: {threads}."]) + "\n"
    file.with_suffix(".md").write_text(text)
    print(text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean(results: Sequence[Result], name: str) -> float:
    """The mean of an entry over the runs that did not diverge; infinite if all did."""
    return statistics.fmean([one[name] for one in results if not one["diverged"]] or [math.inf])


def spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest of losses."""
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}" if count >= 1e7 else f"{count / 1e6:.2f}"
