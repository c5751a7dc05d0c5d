"""Trains a run in this process, which may be one of several ranks."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from adloco.cli import elastic_room
from adloco.cli.alerts import Alerts
from adloco.cli.opening import joined_line
from adloco.cli.rank_processes import RankEnd
from adloco.cli.terminal import open_console, say, working
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import Training
from adloco.config.recipe import build_recipe, read_values
from adloco.config.settings import RunSettings
from adloco.distributed.launch.launcher import (
    num_ranks,
    process_group,
    speaks_for_machine,
    started_again,
    this_rank,
)
from adloco.distributed.launch.signals import told_to_end
from adloco.distributed.messages import all_states
from adloco.errors import RankFailureError, require
from adloco.run.recovery import LostPartsError
from adloco.run.restarted import begun_run, kept_values
from adloco.run.saving import Copies
from adloco.run.starts import Kind
from adloco.run.stored import changeable
from adloco.run.training_run import TrainingRun

if TYPE_CHECKING:
    from adloco.cli.train import Train
    from adloco.elastic.regroup import Regrouping

Settings = list[tuple[str, str]]


def train_here(arguments: "Train", alerts: Alerts) -> int:
    """Train the run of a line in this process; return the exit code. RankFailureError if a rank
    failed, and the others do not recover.
    """
    try:
        recipe = arguments.own_recipe()
    except (ValueError, OSError):  # All ranks must join to say so.
        recipe = build_recipe({})
    settings = recipe.run
    elastic_room.check_settings(settings)
    if num_ranks() == 1 or not elastic_room.is_there():
        return _Process(arguments, settings, alerts).train() or 0
    from adloco.elastic.copies import MemoryCopies
    from adloco.elastic.meeting import first_quorum
    from adloco.elastic.regroup import Regrouping

    quorum = first_quorum()
    if quorum is None:  # The run ended before this process could join.
        return 0
    regrouping = Regrouping(recipe, quorum, arguments.resume)
    process = _Process(arguments, settings, alerts, regrouping, MemoryCopies())
    while (code := process.train()) is None:
        if not process.meets_again():
            return 0
    return code


@dataclass
class _Process:
    """This process's part in a run."""

    arguments: "Train"
    settings: RunSettings
    alerts: Alerts
    regrouping: "Regrouping | None" = None
    copies: Copies | None = None
    failure: str = field(default="", init=False)
    """The failure from which the ranks recover; empty if there was none."""
    joined: bool = field(default=False, init=False)
    """True once this process has trained a part of the run."""

    def __post_init__(self) -> None:
        self.ending = RankEnd(self.alerts)

    def train(self) -> int | None:
        """Train with the ranks that there are.

        Returns:
            The exit code; None if the ranks that remain have to meet again.

        Raises:
            RankFailureError: A rank failed, and the others do not recover.
        """
        regrouping, ending = self.regrouping, self.ending
        recovers = regrouping is not None and regrouping.recovers
        watch = elastic_room.watch(
            ending.after_failure, self.settings, ending.let_go if recovers else None
        )
        quorum = regrouping.quorum if regrouping else None
        group = process_group(self.settings.timeout_seconds, watch=watch, quorum=quorum)
        signals: list[int] = []
        # All is done inside the group, so that bad input on one rank ends all ranks; but the log is
        # closed outside, where the error of another rank has that rank's message.
        try:
            with ExitStack() as opened, group:
                console = open_console(quiet=this_rank() != 0, trains=True)
                run, given = self._take_part(console)
                log = opened.enter_context(train_log(run))
                training = Training(
                    run=run,
                    console=console,
                    log=log,
                    end=ending.after_signal,
                    regrouping=regrouping,
                    alerts=self.alerts,
                    # On several machines, the only one that does.
                    resume="the same line" if self.arguments.restart else "",
                    signals=signals,
                )
                try:
                    code = training.train(given)
                except Exception:
                    # It ends now. After the failure of a rank torchrun tells the others to end at
                    # once, and they would end before they know, and say, which one it was.
                    if not recovers:
                        opened.enter_context(told_to_end(lambda number: None))
                    raise
        except RankFailureError as error:
            if regrouping is None or not regrouping.failed(error):
                raise ending.advised(error) from None
            for number in signals:  # It cannot save, and must not train on with those left.
                ending.after_signal(number)
            self.failure = str(error)
            return None
        if regrouping:
            regrouping.ended(code)
        return code

    def meets_again(self) -> bool:
        """Find the ranks that remain or have returned; `Regrouping.meet` says how."""
        assert self.regrouping
        self.ending.run = None
        try:
            return self.regrouping.meet()
        except RankFailureError as error:
            raise self.ending.advised(error) from None

    def _take_part(self, console: Console) -> tuple[TrainingRun, Settings]:
        """`_open`; a rank that has just joined, with another recipe for instance, ends alone."""
        try:
            return self._open(console)
        except (ValueError, OSError) as error:
            if self.regrouping and self.regrouping.quorum.number and not self.joined:
                self.regrouping.turned_away(error)
                self.ending.turned_away(error)
            raise

    def _open(self, console: Console) -> tuple[TrainingRun, Settings]:
        """Begin the run, or resume it; return it and the settings that it was given."""
        given: Settings = self.arguments.settings
        begun = self.regrouping.folder if self.regrouping else None
        restarted = None if begun else self._restarted()
        folder = begun or self.arguments.resume or restarted
        if folder and not self.arguments.resume:
            given = [(name, text) for name, text in given if name in changeable()]
        if self.regrouping and begun:
            given = [*given, *self.regrouping.given()]
        kind = self.regrouping.kind() if self.regrouping else "resume"
        with working(console, "reading and tokenising text, building models ..."):
            run = self.resume(folder, given, kind) if folder else self._begin()
        if restarted:
            recipe, file = self.arguments.read_recipe(), self.arguments.recipe or "adloco"
            run.notices += filter(None, [kept_values(recipe, read_values(file), run.recipe)])
        self.ending.run, self.ending.folder = run, run.folder
        self.alerts.about = str(run.folder)
        if self.failure:
            said = f"{self.failure}; ranks that continue: {num_ranks()}"
            self.alerts.tell("recovered", said)
            self.failure = ""
        if self.regrouping:
            self.regrouping.opened(run)
        if not self.joined and speaks_for_machine():
            say(open_console(trains=True), joined_line(run))
        self.joined = True
        return run, given

    def _begin(self) -> TrainingRun:
        """A new run; ValueError if it would train again what a failed start has trained."""
        recipe = self.arguments.read_recipe()
        require(
            bool(recipe.run.folder) or not started_again(),
            "torchrun has started the ranks again, and without --restart and --run.folder they "
            "would begin another run; resume the one that failed (adloco runs lists it, if it had "
            "begun) by adloco train --resume, and give both next time",
        )
        return TrainingRun.create(recipe, copies=self.copies)

    def resume(self, folder: Path, given: Settings, kind: Kind) -> TrainingRun:
        """The run in a folder, resumed; RankFailureError if ranks lack parts of all checkpoints."""
        trust = self.arguments.trust_recipe
        try:
            return TrainingRun.resume(folder, given, kind, copies=self.copies, trust_recipe=trust)
        except LostPartsError as error:
            if self.regrouping is None or not self.regrouping.quorum.number:
                raise
            # All would meet here again. A new start waits for the machine that has the parts.
            self.regrouping.recovers = False
            raise RankFailureError(
                f"{error}; the machines that failed have the rest, unless run.copy_every lets each "
                "machine keep copies for another"
            ) from None

    def _restarted(self) -> Path | None:
        """The folder of the run that `--restart` resumes, alike on all ranks; None to begin one."""
        if not self.arguments.restart:
            return None
        recipe = self.arguments.read_recipe()
        mine = str(begun_run(recipe, trust_recipe=self.arguments.trust_recipe) or "")
        folders, again = zip(*all_states([mine, started_again()]), strict=True)
        folder = next(filter(None, folders), "")
        if folder and any(again):
            self.failure = "torchrun has started the ranks again"
        return Path(folder) if folder else None
