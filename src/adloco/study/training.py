"""Training the runs of a study that are missing, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adloco.config.recipe_text import to_toml
from adloco.distributed.launch.local_ranks import INTERRUPTED, ended_by
from adloco.distributed.launch.signals import signals_passed_to
from adloco.distributed.placement.threads import num_cores
from adloco.errors import require
from adloco.metrics import Record
from adloco.run.budget import part_used
from adloco.run.checkpoint import list_checkpoints
from adloco.run.folder import CHECKPOINTS, is_locked, lock_held
from adloco.run.records import Records
from adloco.study.arms import StudyRun

LOGS = "logs"
"""Folder of the processes' output, in the study's folder."""
POLL_SECONDS = 0.5
ENDED = ("done", "failed")
"""States in which a job stays."""
STOPPED = (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
"""Exit codes of a process that was told to end; the last three before it could answer."""


@dataclass
class Job:
    """A run and the process that trains it."""

    run: StudyRun
    state: str = "waiting"
    """waiting, awaited (another process trains it), running, done or failed."""
    problem: str = ""
    """Why it failed or is awaited, in one sentence."""
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    """Time that its process has taken so far."""
    part: float = 0.0
    """The part of its budget that is used, from 0 to 1."""
    last: Record = field(default_factory=dict)
    """The newest line of metrics.jsonl."""


class StudyInterruptedError(Exception):
    """The study was told to stop; its running runs have saved."""


def train_missing(runs: Sequence[StudyRun], folder: Path, parallel: int) -> Iterator[list[Job]]:
    """Train the runs that have not ended, and yield all jobs again and again until they have.

    A run that was cut off is resumed, once no other process trains it any more. Ctrl+C and a
    signal to end are passed to the processes, which save, and no process outlives the iteration.

    Args:
        folder: The study's folder, for the output of the processes.
        parallel: Processes at a time; the cores are shared among them.

    Raises:
        StudyInterruptedError: A signal came.
        ValueError: Another study trains in the folder.
    """
    require(parallel >= 1, f"--parallel must be >= 1, got {parallel}")
    jobs = [Job(run=run, state="done" if run.finished else "waiting", part=1.0) for run in runs]
    for job in jobs:
        if job.state == "waiting":
            job.part = part_used(job.run.recipe.run.limits, Records(job.run.folder).newest())
    yield jobs
    if all(job.state == "done" for job in jobs):
        return
    logs = folder / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with (
        lock_held(folder, "study"),
        signals_passed_to(lambda: [job.process for job in jobs if job.process]) as received,
    ):
        while any(job.state not in ENDED for job in jobs):
            running = [job for job in jobs if job.state == "running"]
            waiting = [job for job in jobs if job.state in ("waiting", "awaited")]
            for job in waiting[: parallel - len(running)]:
                if received:
                    break
                _start(job, logs, parallel)
                if received and job.process is not None:  # The signal came before the process.
                    job.process.send_signal(received[-1])
            for job in running:
                _look_at(job, logs, told_to_end=bool(received))
            yield jobs
            if received and not any(job.state == "running" for job in jobs):
                raise StudyInterruptedError
            time.sleep(POLL_SECONDS)


def _start(job: Job, logs: Path, parallel: int) -> None:
    run = job.run
    if is_locked(run.folder):
        job.state = "awaited"
        job.problem = "another process trains it, such as one that a killed study left behind"
        return
    job.problem = ""
    if run.finished:
        job.state, job.part = "done", 1.0
        return
    if list_checkpoints(run.folder / CHECKPOINTS):
        words = ["--resume", str(run.folder)]
    else:
        recipe = logs.parent / "recipes" / f"{run.folder.name}.toml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        own = replace(run.recipe, run=replace(run.recipe.run, folder=str(run.folder)))
        recipe.write_text(to_toml(own))
        words = [str(recipe)]
    command = [sys.executable, "-m", "adloco", "train", *words]
    shared: dict[str, str] = {}
    if parallel > 1:
        threads = str(max(1, num_cores() // parallel))
        if not run.recipe.run.threads:
            command += ["--run.threads", threads]
        shared["OMP_NUM_THREADS"] = threads
    log = _log(run, logs)
    log.unlink(missing_ok=True)  # A run of a study that was killed may still write to it.
    with log.open("wb") as out:
        job.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | shared,
            start_new_session=True,
        )
    job.state, job.began = "running", time.monotonic()


def _look_at(job: Job, logs: Path, *, told_to_end: bool) -> None:
    assert job.process is not None
    job.seconds = time.monotonic() - job.began
    job.last = Records(job.run.folder).newest()
    job.part = part_used(job.run.recipe.run.limits, job.last)
    code = job.process.poll()
    if code is None:
        return
    if job.run.finished:
        job.state, job.part = "done", 1.0
    elif (told_to_end and code in STOPPED) or is_locked(job.run.folder):
        job.state = "waiting"  # A run that another process has begun meanwhile is awaited.
    elif code < 0:  # It could say nothing itself: the last line of its output is any other.
        job.state, job.problem = "failed", f"it {ended_by(-code)}; the same command continues it"
    else:
        lines = _log(job.run, logs).read_text(errors="replace").strip().splitlines()
        job.state = "failed"
        job.problem = lines[-1].removeprefix("adloco: ") if lines else f"exit code {code}"


def _log(run: StudyRun, logs: Path) -> Path:
    return logs / f"{run.folder.name}.log"
