"""Shows a run while it trains: a live view on a terminal, one plain line per round elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adloco.cli.run_text import (
    batch_text,
    clock,
    event_texts,
    interruptions_text,
    measured_text,
    number_text,
    round_text,
    rounded_text,
    rows_text,
    sent_text,
    wire_name,
    wire_text,
)
from adloco.cli.terminal import Printable
from adloco.metrics import TRAINER, Metric, Record
from adloco.rules.failure_signs import Sign
from adloco.run.folder import LOG
from adloco.run.training_run import TrainingRun

EVENTS_SHOWN = 4
SIGNS_SHOWN = 2


class View(Protocol):
    """Shows rounds as they end."""

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        """Show a round, and the warnings that begin with it."""
        ...


@contextmanager
def open_view(run: TrainingRun, console: Console, signs: Sequence[Sign] = ()) -> Iterator[View]:
    """Open a live view on a terminal, or plain lines elsewhere, until the context ends.

    Args:
        run: The run.
        console: Where to show it.
        signs: Warnings that were given before the run was resumed.
    """
    if not console.is_terminal:
        yield PlainView(console, wire_name(run), run.recipe.task.measures)
        return
    view = LiveView(run, signs)
    # Live calls render() several times a second, so that progress moves within a round too.
    with Live(get_renderable=view.render, console=console, refresh_per_second=4, transient=False):
        yield view


class PlainView:
    """Prints one line per round.

    Args:
        console: Where to print.
        wire: The value of `wire.format`, which encodes the pseudo-gradients.
        measures: What the task measures in an evaluation, the loss first.
    """

    def __init__(self, console: Console, wire: str, measures: Sequence[Metric]) -> None:
        self._console = console
        self._wire = wire
        self._measures = measures

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        self._console.print(round_text(record, self._wire, self._measures), soft_wrap=True)
        for text in event_texts(record):
            self._console.print(f"            {text}", soft_wrap=True)
        for sign in signs:
            self._console.print(f"            warning: {sign.text}", style="yellow", soft_wrap=True)


class LiveView:
    """A panel with the progress, a row per trainer, merges, bytes and speed."""

    def __init__(self, run: TrainingRun, signs: Sequence[Sign] = ()) -> None:
        self._run = run
        self._wire = wire_name(run)
        self._resumed_at = run.progress()
        self._record: Record | None = run.history[-1] if run.history else None
        self._events = [text for record in run.history for text in event_texts(record)]
        self._signs = [*signs]
        self._measured: dict[int, str] = {}
        for record in run.history:
            self._take_measures(record)

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        self._record = record
        self._signs += signs
        self._events += event_texts(record)
        self._take_measures(record)

    def _take_measures(self, record: Record) -> None:
        measures = self._run.recipe.task.measures
        self._measured |= {
            row["trainer"]: measured_text(row, measures)
            for row in record["trainers"]
            if row["val_loss"] is not None
        }

    def render(self) -> RenderableType:
        """The panel with the numbers of this moment."""
        recipe = self._run.recipe
        parts: list[RenderableType] = [self._progress()]
        if self._record is None:
            parts.append(Text("first round running ...", style="dim"))
        else:
            parts += [self._trainers(self._record), self._traffic(self._record)]
        lost = interruptions_text(self._run.starts.lines, self._run.progress().seconds)
        parts += [Text(lost, style="dim")] if lost else []
        parts += [Text(text, style="magenta") for text in self._events[-EVENTS_SHOWN:]]
        parts += self._warnings()
        title, folder = Text(f"adloco: {recipe.run.name}"), Text(str(self._run.folder))
        panel = Panel(Group(*parts), title=title, subtitle=folder, border_style="cyan")
        # The terminal echoes Ctrl+C as ^C at the cursor. Without the empty line it would follow the
        # border, which is as wide as the terminal, and wrap, and the next drawing would begin one
        # line too low.
        return Printable(Group(panel, Text()))

    def _warnings(self) -> list[Text]:
        """The latest warnings, and how many there were before them."""
        hidden = len(self._signs) - SIGNS_SHOWN
        earlier = [Text(f"{hidden} earlier warnings are in {LOG}", "yellow")] if hidden > 0 else []
        latest = [Text(f"warning: {sign.text}", "yellow") for sign in self._signs[-SIGNS_SHOWN:]]
        return earlier + latest

    def _progress(self) -> RenderableType:
        now = self._run.progress()
        speed = (now.tokens - self._resumed_at.tokens) / max(
            1e-9, now.seconds - self._resumed_at.seconds
        )
        # The last inner step may train on more than the budget.
        used = now.part - self._resumed_at.part
        seconds = now.seconds - self._resumed_at.seconds
        left = (1 - now.part) / used * seconds if used > 0 else None
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        label = (
            f"{now.budget}   {clock(now.seconds)} gone, {clock(left)} left   {speed:,.0f} tokens/s"
        )
        grid.add_row(ProgressBar(total=1, completed=now.part), label)
        if now.rows is not None:
            grid.add_row("", rows_text(now.rows, now.rows_per_second))
        return grid

    def _trainers(self, record: Record) -> RenderableType:
        table = Table(expand=True, box=None, header_style="bold", padding=(0, 1))
        for column in (
            "trainer",
            "val loss",
            "train loss",
            "requested batch",
            "micro x steps",
            "noise scale",
            "workers",
        ):
            table.add_column(column, justify="right")
        gone = {trainer for merge in record["merges"] for trainer in merge["absorbed"]}
        for row in record["trainers"]:
            table.add_row(
                f"{row['trainer']}{' (merged)' if row['trainer'] in gone else ''}",
                self._measured.get(row["trainer"], "-"),
                TRAINER["train_loss"].text(row["train_loss"]),
                batch_text(row),
                f"{row['micro_batch']} x {row['accumulation_steps']}{rounded_text(row)}",
                TRAINER["noise_scale"].text(row["noise_scale"]),
                str(row["workers"]),
            )
        return table

    def _traffic(self, record: Record) -> RenderableType:
        sent, ddp = record["bytes_communicated"], record["bytes_ddp_equivalent"]
        times_less = f"{ddp / sent:,.0f}x less than the " if record["syncs"] else ""
        sync = record["sync"]
        shrunk = wire_text(sync, self._wire, "", ", ")
        text = f"round {record['round']}, {record['syncs']} syncs, "
        text += f"{sent_text(record)} sent per worker{shrunk}; "
        text += (
            f"{times_less}{number_text(record, 'bytes_ddp_equivalent')} that DDP would have sent"
        )
        if sync["bytes"]:
            text += f"; this round's syncs: {sync['exposed_seconds']:.2f} s waited, "
            text += f"{sync['hidden_seconds']:.2f} s hidden"
        return Text(text, style="dim")
