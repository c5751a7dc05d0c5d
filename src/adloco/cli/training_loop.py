"""The loop of `adloco train`: shows each round; Ctrl+C ends it after the inner step in progress."""

import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from rich.console import Console

from adloco.cli.view import open_view, summary_lines
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.report.page import write_report
from adloco.run.trackers import TrackerWarning
from adloco.run.training_run import TrainingRun

SECOND_SIGNAL_SECONDS = 1.0


def train(run: TrainingRun, console: Console) -> int:
    """Train until the budget is spent or the user stops the run; return the exit code."""
    if run.finished:
        console.print(
            f"{run.folder} has spent its budget already ({run.progress().budget})",
            soft_wrap=True,
        )
    for notice in run.notices:
        console.print(notice, style="bold red", soft_wrap=True)
    with _interruptible(run), open_view(run, console) as view, _plain_warnings():
        for record in run.rounds():
            view.show(record)
    if run.recipe.data.streaming and (left_out := run.task.skipped()):
        console.print(left_out, style="bold red", soft_wrap=True)
    if not run.finished:  # Stopped, here or on another rank.
        console.print(
            f"stopped and saved; go on with: adloco train --resume {run.folder}", soft_wrap=True
        )
        return INTERRUPTED
    if not run.placement.is_rank_zero:
        return 0
    with console.status("drawing the report ..."):
        summary = run.finish()
        write_report(run.folder)
    for line in summary_lines(run, summary):
        console.print(line, soft_wrap=True)
    return 0


@contextmanager
def _interruptible(run: TrainingRun) -> Iterator[None]:
    """Ctrl+C, SIGTERM or SIGHUP stops the run after the inner step in progress; a second signal
    raises KeyboardInterrupt.
    """
    received: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # The terminal sends Ctrl+C to all processes, and a launcher sends it to its ranks again, so
        # a second signal counts only after a while.
        if received and time.monotonic() - received[0] > SECOND_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        received.append(time.monotonic())
        run.stop()

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print a tracker's warning as one sentence, without file name and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        show_others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, TrackerWarning):
                print(f"adloco: {message}", file=sys.stderr)
            else:
                show_others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
