"""The loop of `adloco train`: shows and logs rounds; Ctrl+C ends it after the inner step."""

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from adloco.cli.alerts import Alerts
from adloco.cli.closing import closing_lines
from adloco.cli.opening import opening_lines
from adloco.cli.run_text import evaluation_text, event_texts, round_text, wire_name
from adloco.cli.terminal import print_error, say, working
from adloco.cli.view import open_view
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.distributed.launch.signals import SECOND_SIGNAL_SECONDS, LastResort, told_to_end
from adloco.errors import RunWarning
from adloco.metrics import Record
from adloco.options import signs_of_options
from adloco.report.page import PAGE, write_report
from adloco.report.readable import BYTES, readable
from adloco.rules.failure_signs import NewSigns
from adloco.rules.outcome import no_success
from adloco.run.folder import SUMMARY, resume_line
from adloco.run.training_run import TrainingRun
from adloco.whole_file import remedy

if TYPE_CHECKING:
    from adloco.elastic.regroup import Regrouping


@dataclass(kw_only=True)
class Training:
    """Trains a run, and says what happens to a person on the console, and in train.log."""

    run: TrainingRun
    console: Console
    log: logging.Logger
    """The log of `train_log`."""
    end: Callable[[int], None] | None = None
    """Called with a signal that came while this rank waited for another one for longer than
    run.grace_seconds. It must end the process. None: this process is alone."""
    regrouping: "Regrouping | None" = None
    """Other ranks that may join or continue alone; None: there are none."""
    alerts: Alerts = field(default_factory=Alerts)
    """Told that the run stalls, recovers or ends."""
    resume: str = ""
    """What resumes the run, in words; empty: `adloco train --resume` does."""
    signals: list[int] = field(default_factory=list)
    """Signals that told this process to end, as they come."""
    _said: set[str] = field(default_factory=set, init=False)

    def train(self, settings: Sequence[tuple[str, str]]) -> int | None:
        """Train until the budget is spent, the user stops the run, or its ranks are to meet again.

        settings: (section.key, value) of the settings on the line, to be logged.

        Returns:
            The exit code; None if the run was saved for its ranks to meet again.
        """
        run = self.run
        self._log_start(settings)
        spent, page = run.finished, run.folder / PAGE
        again = self.resume or resume_line(run.folder)
        if spent:
            self._say(f"{run.folder} has spent its budget already ({run.progress().budget})")
        else:
            for line in opening_lines(run):
                self._say(line)
        for notice in run.notices:
            self._say(notice, logging.WARNING)
        records = run.records.read() if run.placement.is_rank_zero else []
        times = [0.0, *(record["seconds"] for record in records)]
        longest = max((end - begin for begin, end in pairwise(times)), default=0.0)
        self.check_times(longest)
        saved, joining = run.saving.newest, False
        new_signs = NewSigns(run.recipe.batch_cap, signs_of_options())
        earlier = [sign for record in records for sign in new_signs.see(record)]
        with (
            _interruptible(run, self.end, self.signals),
            open_view(run, self.console, earlier) as show,
            _plain_warnings(self.log),
        ):
            seconds = times[-1]
            for record in self.alerts.watched(run.rounds(), longest):
                signs = new_signs.see(record)
                show(record, signs)
                self._log_round(record)
                for sign in signs:
                    self.log.warning("%s", sign.text)
                if run.saving.newest != saved:
                    saved = run.saving.newest
                    self.log.info("checkpoint %s in %.1f s", saved, run.saving.seconds)
                self.check_times(record["seconds"] - seconds)
                seconds = record["seconds"]
                self._say_copies()
                if not run.finished and self.regrouping and self.regrouping.others_wait():
                    joining = True
                    run.stop()
        if run.recipe.data.streaming and (amiss := run.task.skipped()):
            self._say(amiss, logging.WARNING)
        signals = self.signals
        # Asked of all ranks, because one alone that was told to stop would wait for the others.
        if joining and not run.finished and not run.placement.any(bool(signals)):
            self._say("other ranks have come; all continue together")
            return None
        if not run.finished:  # Stopped, here or on another rank.
            for number in signals[:1]:
                self.log.warning("told to stop by %s", signal.Signals(number).name)
            if self.regrouping and self.regrouping.others_continue(signals):
                if not signals:
                    return None
                self._say("stopped and saved; the other ranks continue the run")
                return INTERRUPTED
            self.log.info("checkpoint %s", run.saving.newest)
            stopped = f"stopped and saved; resume with: {again}"
            self._say(stopped)
            self.alerts.tell("stopped", stopped)
            return INTERRUPTED
        if not run.placement.is_rank_zero:
            return 0
        if spent and page.exists() and (run.folder / SUMMARY).exists():
            self._say(f"its report is {page}")
            return 0
        try:
            sampling = "sampling a text, and " * run.recipe.task.generates
            with working(self.console, f"{sampling}drawing the report ..."):
                summary = run.finish()
                write_report(run.folder)
        except OSError as error:
            unwritten = (
                f"the report cannot be written in {run.folder} ({error.strerror or error}); "
                f"{remedy(error)}, then write it with: {again}"
            )
            self._say(unwritten, logging.WARNING)
            self.alerts.tell("ended", unwritten)
            return 0
        records = run.records.read()
        closing = closing_lines(run, summary, records)
        for line in closing:
            self._say(line)
        self.alerts.tell("ended", closing[0])
        problem = no_success(records)
        if problem:
            self._say(problem, logging.WARNING)
        return 0

    def check_times(self, longest: float) -> None:
        """Say if a checkpoint takes longer than a stop may, or a round than ranks are waited for.

        longest: Seconds of the longest round.
        """
        settings, seconds = self.run.recipe.run, self.run.saving.seconds
        if seconds > settings.grace_seconds:
            self._say_once(
                "checkpoint",
                f"the last checkpoint took {seconds:.0f} s, longer than run.grace_seconds = "
                f"{settings.grace_seconds:g}: a run that is told to stop may be killed before it "
                "has saved; let the launcher or scheduler wait longer (torchrun "
                "--shutdown-timeout) and set run.grace_seconds to that",
            )
        longest = max(longest, seconds)
        if self.run.placement.num_ranks > 1 and longest > settings.timeout_seconds:
            self._say_once(
                "round",
                f"a round or checkpoint of this run took {longest:.0f} s, longer than "
                f"run.timeout_seconds = {settings.timeout_seconds:g}: ranks wait for a slow one at "
                f"most ten times that; set it to {2 * longest:.0f} or more",
            )

    def _say_copies(self) -> None:
        """Say once how much memory the copies of the run's state take here."""
        copies = self.run.copies
        if copies and copies.bytes_kept:
            size = readable(copies.bytes_kept, BYTES)
            words = f"copies of this island's state and of another's take {size} here"
            self._say_once("copies", words, logging.INFO)

    def _say_once(self, about: str, text: str, level: int = logging.WARNING) -> None:
        """Say the first text about something."""
        if about not in self._said:
            self._said.add(about)
            self._say(text, level)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        style = "bold red" if level > logging.INFO else None
        say(self.console, text, style)
        self.log.log(level, "%s", text.strip())

    def _log_start(self, settings: Sequence[tuple[str, str]]) -> None:
        run = self.run
        rounds = run.algorithm.state.rounds_done
        self.log.info(
            "adloco %s %s %s in %s, %s done",
            metadata.version("adloco"),
            "resumes" if run.resumed else "trains",
            run.recipe.run.name,
            run.folder,
            run.progress().budget,
        )
        for name, value in settings:
            self.log.info("setting on the line: %s = %s", name, value)
        resumed = f"; continues in round {rounds + 1}" if run.resumed else ""
        self.log.info("checkpoint %s%s", run.saving.newest, resumed)

    def _log_round(self, record: Record) -> None:
        run = self.run
        measures = run.recipe.task.measures
        self.log.info("%s", round_text(record, wire_name(run), measures))
        for text in filter(None, [evaluation_text(record, measures), *event_texts(record)]):
            self.log.info("%s", text)


@contextmanager
def _interruptible(
    run: TrainingRun, end: Callable[[int], None] | None, numbers: list[int]
) -> Iterator[None]:
    """Ctrl+C, SIGTERM or SIGHUP stops the run after the inner step in progress; a second signal
    raises KeyboardInterrupt.

    numbers: Gets the signals that come.
    """
    received: list[float] = []

    def stop(number: int) -> None:
        if received and time.monotonic() - received[0] > SECOND_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        received.append(time.monotonic())
        numbers.append(number)
        run.stop()

    waiting = None
    if end and run.placement.num_ranks > 1:
        seconds = run.recipe.run.grace_seconds
        waiting = LastResort(act=end, seconds=seconds, busy=lambda: run.saving.in_progress)
    with told_to_end(stop, waiting):
        yield


@contextmanager
def _plain_warnings(log: logging.Logger) -> Iterator[None]:
    """Log warnings, and print those of a run as one sentence, without file name and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunWarning)
        show_others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            log.warning("%s", message)
            if issubclass(category, RunWarning):
                print_error(str(message))
            else:
                show_others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
