"""Runs of one small problem, each trained once and kept in a JSON file with its whole curve.

`bytes_to_loss.py`, `frontier.py` and `studies.py` choose the runs and make the tables; what is
missing is trained by `adloco.study`, each run in a process of its own. A run is found by a key of
its settings, so a study can be stopped at any time: the same command resumes it. The text of a
study's page (its problem, protocol and numbers) stands in the page itself, NAME.md beside the
script; the tables below it are replaced.
"""

import argparse
import hashlib
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import script_parser

from adloco.algorithms.model_state import ADVICE
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.run.folder import ENVIRONMENT, SUMMARY
from adloco.run.json_files import read_json
from adloco.run.records import Records
from adloco.run.start import open_recipe
from adloco.study.arms import StudyRun
from adloco.study.training import Job, StudyInterruptedError, train_missing
from adloco.whole_file import write_text

WORKERS, BATCH, EVALUATION_STEPS, TUNING_SEED = 4, 16, 40, 1000
REPRODUCE = Path(__file__).parents[1] / "reproduce"

GONE = ("batch.smoothing",)
"""Flags of stored runs that no version has any more."""
STORED_AS = {"wire.feedback_decay": "wire.error_feedback"}
"""Flags that stored runs and keys have under another name."""
Result = dict[str, Any]
"""A run in the JSON file: its settings, and its curve column by column."""


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
ADLOCO, DILOCO = (str(REPRODUCE / f"{name}.toml") for name in ("adloco", "diloco"))
FORMATS = ("bf16", "int8", "int4", "int2", "int1")
ARMS = {
    "ddp": ("ddp", f"batch.initial={BATCH}"),
    "outer-alone": (DILOCO, f"{SPREAD} method.workers_per_trainer=1"),
    "local-sgd": ("local-sgd", SPREAD),
    "diloco": (DILOCO, SPREAD),
    "adloco": (ADLOCO, TRAINERS),
    **{f"diloco-{name}": (DILOCO, f"{SPREAD} wire.format={name}") for name in FORMATS},
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


def result_of(spec: Spec, job: Job) -> Result:
    """The result of a run that has ended; divergence is a result."""
    folder = job.run.folder
    environment = read_json(folder / ENVIRONMENT)
    curve: dict[str, list[float]] = {}
    seconds, tokens, record = 0.0, 0, {}
    for record in Records(folder).read():
        # A run that was stopped in a round's last step has nothing left to train in it.
        speed = record["tokens_per_second"]
        seconds += (record["tokens"] - tokens) / speed if speed else 0.0
        tokens = record["tokens"]
        if record["val_loss"] is not None:
            for name, value in point(record, seconds, spec.arm in DATA_PARALLEL).items():
                curve.setdefault(name, []).append(value)
    diverged = job.problem
    return {
        "arm": spec.arm,
        "inner": spec.inner,
        "sync_every": spec.sync_every,
        "seed": spec.seed,
        "flags": spec.flags,
        "git": environment["git"],
        "torch": environment["versions"]["torch"],
        "device": environment["device"],
        "threads": environment["torch_threads"],
        "parameters": sum(each.numel() for each in open_recipe(spec.recipe()).builder.parameters)
        if diverged
        else read_json(folder / SUMMARY)["num_parameters"],
        "diverged": diverged,
        "final_loss": None if diverged else curve["loss"][-1],
        "curve": curve,
        **{name: record.get(name, 0) for name in ("inner_steps", "samples")},
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
    """The runs in a JSON file, one per line."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[str, Result]:
        """All runs by key."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def read_some(self) -> dict[str, Result]:
        """All runs by key; ValueError if there is none."""
        runs = self.read()
        require(bool(runs), f"there are no runs in {self.file}; run without --table first")
        return runs

    def add(self, key: str, result: Result) -> None:
        runs = self.read() | {key: result}
        lines = (
            f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}" for name, run in runs.items()
        )
        write_text(self.file, "{\n" + ",\n".join(lines) + "\n}\n")


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
    return {STORED_AS.get(name, name): value for name, value in flags.items()}


def trained(specs: Sequence[Spec], options: argparse.Namespace) -> None:
    """Train those of these runs that --json lacks, --parallel at a time.

    Raises:
        ValueError: A run failed, and did not diverge.
    """
    store = Store(options.json)
    missing = [spec for spec in specs if spec.key not in store.read()]
    for spec, result in train_runs(missing, options.json.stem, options.parallel):
        store.add(spec.key, result)


def train_runs(specs: Sequence[Spec], name: str, parallel: int) -> Iterator[tuple[Spec, Result]]:
    """Train runs, so many at a time, and yield each with its result as soon as it has ended. Ctrl+C
    lets them save and ends the script.

    Args:
        specs: The runs.
        name: The study's; its runs are in runs/benchmarks/NAME until they have ended.
        parallel: Runs at once.

    Raises:
        ValueError: A run failed, and did not diverge; the others have ended.
    """
    folder, waiting = Path("runs", "benchmarks", name), {spec.key: spec for spec in specs}
    number, failed = len(waiting), []
    runs = [
        StudyRun(arm=str(spec), seed=spec.seed, recipe=spec.recipe(), folder=folder / key)
        for key, spec in waiting.items()
    ]
    try:
        for states in train_missing(runs, folder, parallel):
            for job in states:
                if job.state not in ("done", "failed") or job.run.folder.name not in waiting:
                    continue
                spec = waiting.pop(job.run.folder.name)
                if job.problem and ADVICE not in job.problem:
                    failed.append(f"{spec}: {job.problem}")
                    continue
                result = result_of(spec, job)
                yield spec, result
                shutil.rmtree(job.run.folder)
                loss = result["diverged"] or f"loss {result['final_loss']:.4f}"
                ended = f"[{number - len(waiting)}/{number}]"
                print(f"{ended} {spec}: {loss} ({job.seconds:.0f} s)", flush=True)
    except StudyInterruptedError:
        sys.exit("stopped and saved; the same command resumes")
    require(not failed, "; ".join(failed))


def study_parser(doc: str, file: Path) -> argparse.ArgumentParser:
    """A parser with the options that all studies have.

    Args:
        doc: The study's description.
        file: Its results, unless --json names another file.
    """
    parser = script_parser(doc)
    add = parser.add_argument
    add("--table", action="store_true", help="only write the page; train nothing")
    add("--parallel", type=int, default=2, help="runs at once (default: 2)")
    add("--json", type=Path, default=file, help="file of the results; tables are written beside it")
    return parser


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


def mean(results: Sequence[Result], name: str) -> float:
    """The mean of an entry over the runs that did not diverge; infinite if all did."""
    known = [one.get(name, math.nan) for one in results if not one["diverged"]]
    return statistics.fmean(known or [math.inf])


def spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest of losses."""
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}" if count >= 1e7 else f"{count / 1e6:.2f}"
