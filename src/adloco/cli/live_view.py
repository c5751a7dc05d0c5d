"""The live view of a run: a panel with its progress, losses, trainers, bytes and warnings."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adloco.cli.run_text import (
    against_text,
    clock,
    event_texts,
    interruptions_text,
    measured_text,
    noise_text,
    number_text,
    rounded_text,
    rows_text,
    saved_text,
    sent_text,
    use_text,
    wire_name,
    wire_text,
)
from adloco.cli.terminal import Printable
from adloco.metrics import TRAINER, Record, clipped_by, validation
from adloco.report.readable import counted
from adloco.rules.failure_signs import Sign
from adloco.rules.outcome import islands_in
from adloco.run.folder import LOG
from adloco.run.training_run import TrainingRun

EVENTS_SHOWN = 4
SIGNS_SHOWN = 2
LEGEND = (
    "micro x steps: samples at once, and how often in one inner step; noise scale: the batch in "
    "which noise and signal of the gradient are equal"
)
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_COLUMNS = 32


class LiveView:
    """The terminal's view of a run while it trains.

    It is drawn several times a second, so it keeps what it shows of past rounds, not their records.
    """

    def __init__(self, run: TrainingRun, signs: Sequence[Sign] = ()) -> None:
        self._run = run
        self._resumed_at = run.progress()
        self._loss = validation(run.recipe.task.measures[0])
        self._signs = [*signs]
        self._events: list[str] = []
        self._train_losses: list[float | None] = []
        self._last: Record | None = None
        self._evaluated: Record | None = None
        self._best: Record | None = None
        self._trainer_losses: dict[int, float] = {}
        """The newest evaluated round, the best one, and the newest loss of each trainer."""
        for record in run.records.read():
            self._take(record)
        self._of_rounds = self._draw_rounds()

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        """Take a round, and the warnings that begin with it."""
        self._signs += signs
        self._take(record)
        self._of_rounds = self._draw_rounds()

    def _take(self, record: Record) -> None:
        self._last = record
        # A new list: another thread may be drawing the old one.
        self._events = [*self._events, *event_texts(record)][-EVENTS_SHOWN:]
        self._train_losses.append(record["train_loss"])
        name = self._loss.name
        if record[name] is not None:
            self._evaluated = record
            best = self._best
            if not best or islands_in(best) != islands_in(record) or record[name] < best[name]:
                self._best = record
        self._trainer_losses |= {
            row["trainer"]: row[name] for row in record["trainers"] if row[name] is not None
        }

    def render(self) -> RenderableType:
        """The panel with the numbers of this moment."""
        recipe = self._run.recipe
        parts: list[RenderableType] = [*self._progress(), *self._of_rounds]
        cost = interruptions_text(self._run.starts.lines, self._run.progress().seconds)
        parts += [Text(cost, style="dim")] if cost else []
        parts += [Text(text, style="magenta") for text in self._events]
        parts += self._warnings()
        title, folder = Text(f"adloco: {recipe.run.name}"), Text(str(self._run.folder))
        panel = Panel(Group(*parts), title=title, subtitle=folder, border_style="cyan")
        # The terminal echoes Ctrl+C as ^C at the cursor. Without the empty line it would follow the
        # border, which is as wide as the terminal, and wrap, and the next drawing would begin one
        # line too low.
        return Printable(Group(panel, Text()))

    def _draw_rounds(self) -> list[RenderableType]:
        """The part of the panel that changes only with a round."""
        last = self._last
        if last is None:
            return [Text("first round running ...", style="dim")]
        trainers, legend = self._trainers(last), Text(LEGEND, style="dim")
        return [self._losses(last), trainers, legend, self._traffic(last)]

    def _warnings(self) -> list[Text]:
        """The latest warnings, and how many there were before them."""
        hidden = len(self._signs) - SIGNS_SHOWN
        earlier = [Text(f"{hidden} earlier warnings are in {LOG}", "yellow")] if hidden > 0 else []
        latest = [Text(f"warning: {sign.text}", "yellow") for sign in self._signs[-SIGNS_SHOWN:]]
        return earlier + latest

    def _progress(self) -> list[RenderableType]:
        now, start, last = self._run.progress(), self._resumed_at, self._last
        seconds = now.seconds - start.seconds
        speed = (now.tokens - start.tokens) / max(1e-9, seconds)
        used = now.part - start.part
        left = (1 - now.part) / used * seconds if used > 0 else None
        gone = (
            f"{now.budget}   {clock(now.seconds)} gone, {clock(left)} left   {speed:,.0f} tokens/s"
        )
        done = last["round"] if last else 0
        where = f"round {done} done"
        if now.round_steps:
            where = f"round {done + 1}, inner step {now.inner_step} of {now.round_steps}"
        if last:
            gone += use_text(last)
            where += f"   learning rate {number_text(last, 'learning_rate')}"
        rows = rows_text(now.rows)
        bar = Table.grid(expand=True)  # A bar by itself does not end its line.
        bar.add_row(ProgressBar(total=1, completed=now.part))
        return [bar, Text(gone), Text(where + (f"   {rows}" if rows else ""))]

    def _losses(self, record: Record) -> Text:
        """A sparkline of the train loss, the newest validation, and the best so far."""
        bars, measures = sparkline(self._train_losses), self._run.recipe.task.measures
        text = Text.assemble("train loss ", (bars, "cyan"), f" {number_text(record, 'train_loss')}")
        if self._evaluated and self._best:
            text.append(
                f"\nvalidation loss {measured_text(self._evaluated, measures)}; best "
                f"{measured_text(self._best, measures)} in round {self._best['round']}"
            )
        return text

    def _trainers(self, record: Record) -> RenderableType:
        """A row per trainer, with what its batch rule requests and what it uses."""
        table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
        # Lines of their own: rich cuts off the last columns to fit words that it wraps by itself.
        for column in (
            "trainer",
            "val\nloss",
            "train\nloss",
            "requested\nbatch",
            "used\nbatch",
            "micro x\nsteps",
            "noise\nscale",
            "workers",
        ):
            whole = column.endswith("batch")  # A clipped batch says so.
            table.add_column(column, justify="right", vertical="bottom", no_wrap=whole)
        gone = {trainer for merge in record["merges"] for trainer in merge["absorbed"]}
        for row in record["trainers"]:
            clipped = clipped_by(row, self._run.recipe.batch_cap)
            table.add_row(
                f"{row['trainer']}{' (merged)' if row['trainer'] in gone else ''}",
                self._loss.text(self._trainer_losses.get(row["trainer"])),
                TRAINER["train_loss"].text(row["train_loss"]),
                str(row["requested_batch"]),
                f"{row['trainer_batch']}{' clipped' if clipped else ''}",
                f"{row['micro_batch']} x {row['accumulation_steps']}{rounded_text(row)}",
                noise_text(row),
                str(row["workers"]),
            )
        return table

    def _traffic(self, record: Record) -> RenderableType:
        sync = record["sync"]
        shrunk = wire_text(sync, wire_name(self._run), ")", " (")
        # Before the first sync a comparison would only flatter.
        beside = saved_text(record) if record["syncs"] else against_text(record)
        syncs = counted(record["syncs"], "sync")
        text = f"{syncs}, {sent_text(record)} sent per worker{shrunk}: {beside}"
        if sync["bytes"]:
            text += f"; this round's syncs: {sync['exposed_seconds']:.2f} s waited, "
            text += f"{sync['hidden_seconds']:.2f} s hidden"
        return Text(text, style="dim")


def sparkline(numbers: Sequence[float | None]) -> str:
    """Bars of the numbers from the lowest to the highest, at most `SPARKLINE_COLUMNS` of them.

    A bar of more than one number is their mean; numbers that are not known or not finite have none.
    """
    known = [number for number in numbers if number is not None and abs(number) < float("inf")]
    columns = min(SPARKLINE_COLUMNS, len(known))
    ends = [len(known) * column // columns for column in range(columns + 1)] if columns else [0]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(ends)]
    low = min(means, default=0.0)
    height = max(means, default=0.0) - low
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / height * top) if height else 0] for mean in means)
