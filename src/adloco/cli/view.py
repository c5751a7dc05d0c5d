"""Shows a run while it trains: a live view on a terminal, one plain line per round elsewhere, and a
summary at the end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adloco.config.recipe_text import named_settings
from adloco.metrics import ROUND, TRAINER, Metric, Record, validation, values
from adloco.rules.failure_signs import Sign, all_signs
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
def open_view(run: TrainingRun, console: Console) -> Iterator[View]:
    """Open a live view on a terminal, or plain lines elsewhere, until the context ends."""
    if not console.is_terminal:
        yield PlainView(console, wire_name(run), run.recipe.task.measures)
        return
    view = LiveView(run)
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

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._wire = wire_name(run)
        self._resumed_at = run.progress()
        self._record: Record | None = run.history[-1] if run.history else None
        self._events = [text for record in run.history for text in event_texts(record)]
        self._signs = all_signs(run.history, run.recipe.batch_cap)
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
            row["trainer"]: _measured(row, measures)
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
        parts += [Text(text, style="magenta") for text in self._events[-EVENTS_SHOWN:]]
        parts += self._warnings()
        title, folder = f"adloco: {recipe.run.name}", str(self._run.folder)
        panel = Panel(Group(*parts), title=title, subtitle=folder, border_style="cyan")
        # The terminal echoes Ctrl+C as ^C at the cursor. Without the empty line it would follow the
        # border, which is as wide as the terminal, and wrap, and the next drawing would begin one
        # line too low.
        return Group(panel, Text())

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
            grid.add_row("", _rows(now.rows, now.rows_per_second))
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
                _batch(row),
                f"{row['micro_batch']} x {row['accumulation_steps']}{_rounded(row)}",
                TRAINER["noise_scale"].text(row["noise_scale"]),
                str(row["workers"]),
            )
        return table

    def _traffic(self, record: Record) -> RenderableType:
        sent, ddp = record["bytes_communicated"], record["bytes_ddp_equivalent"]
        times_less = f"{ddp / sent:,.0f}x less than the " if record["syncs"] else ""
        sync = record["sync"]
        shrunk = _compressed(sync, self._wire, "", ", ")
        text = f"round {record['round']}, {record['syncs']} syncs, "
        text += f"{_sent(record)} sent per worker{shrunk}; "
        text += f"{times_less}{_shown(record, 'bytes_ddp_equivalent')} that DDP would have sent"
        if sync["bytes"]:
            text += f"; this round's syncs: {sync['exposed_seconds']:.2f} s waited, "
            text += f"{sync['hidden_seconds']:.2f} s hidden"
        return Text(text, style="dim")


def summary_lines(run: TrainingRun, summary: dict[str, Any]) -> list[str]:
    """Five lines about a finished run, one that names its files, and one with a next command."""
    last = run.history[-1]
    merges = sum(len(record["merges"]) for record in run.history)
    batches = [row["requested_batch"] for record in run.history for row in record["trainers"]]
    ratio = (
        f", {last['bytes_ddp_equivalent'] / summary['bytes']:,.0f}x less than DDP"
        if summary["syncs"]
        else ""
    )
    shrunk = _compressed(summary, wire_name(run), "", ", ")
    seconds = (
        f"; in them {summary['exposed_seconds']:,.1f} s waited, {summary['hidden_seconds']:,.1f} s "
        "hidden"
        if summary["syncs"]
        else ""
    )
    return [
        "; ".join(
            _first_to_last(validation(measure), run.history, summary)
            for measure in run.recipe.task.measures
            if measure.panel
        ),
        f"{summary['tokens']:,} tokens in {summary['rounds']} rounds, "
        f"{clock(summary['seconds'])}, {summary['num_parameters']:,} parameters",
        f"requested batch {min(batches)} to {max(batches)} samples, {merges} merges, "
        f"{len(last['trainers'])} trainers in the last round",
        f"{summary['syncs']} syncs, {_sent(last)} sent per worker{shrunk}{ratio}{seconds}",
        f"{summary['tokens'] / summary['seconds']:,.0f} tokens/s with evaluation and checkpoints, "
        f"{_shown(last, 'memory_bytes')} at most",
        f"report {run.folder / 'report.html'}, metrics {run.folder / 'metrics.jsonl'}, checkpoints "
        f"{run.folder / 'checkpoints'}",
        f"compare it with another: adloco compare {run.folder} OTHER_RUN_OR_RECIPE",
    ]


def round_text(record: Record, wire: str, measures: Sequence[Metric]) -> str:
    """A round in one line.

    Args:
        record: The round's line of metrics.jsonl.
        wire: The value of `wire.format`, which encodes the pseudo-gradients.
        measures: What the task measures in an evaluation, the loss first.
    """
    trainers = " | ".join(
        f"t{row['trainer']} batch {_batch(row)} = {row['workers']}w x "
        f"{row['micro_batch']}x{row['accumulation_steps']}{_rounded(row)}"
        for row in record["trainers"]
    )
    loss = "" if record["val_loss"] is None else f" val {_measured(record, measures)}"
    return (
        f"round {record['round']:>4}  {record['tokens']:>10,} tokens  train "
        f"{_shown(record, 'train_loss')}{loss}  {trainers}"
        f"  sent {_sent(record)} ({_compressed(record['sync'], wire, '; ')}DDP "
        f"{_shown(record, 'bytes_ddp_equivalent')})"
        f"  {_shown(record, 'tokens_per_second')} tok/s  "
        f"{_rows(record['rows_read'], record['rows_per_second'])}"
    ).rstrip()


def evaluation_text(record: Record, measures: Sequence[Metric]) -> str:
    """The validation of each trainer in one line; empty if only one trainer was evaluated."""
    found = [
        f"trainer {row['trainer']} {_measured(row, measures)}"
        for row in record["trainers"]
        if row["val_loss"] is not None
    ]
    return f"round {record['round']}: validation, {'; '.join(found)}" if len(found) > 1 else ""


def wire_name(run: TrainingRun) -> str:
    """The run's `wire.format`."""
    name: str = named_settings(run.recipe)["wire.format"]
    return name


def event_texts(record: Record) -> list[str]:
    """What happened in a round besides training: memory that ran out, merges."""
    limit = record["pass_limit"]
    ran_out = (
        [
            f"round {record['round']}: memory ran out; from here on with micro-batches of at most "
            f"{limit}"
        ]
        if limit
        else []
    )
    return ran_out + [
        f"round {record['round']}: trainer {', '.join(map(str, merge['absorbed']))} merged into "
        f"trainer {merge['survivor']}, weights "
        + ", ".join(f"{trainer}: {weight:.2f}" for trainer, weight in merge["weights"].items())
        for merge in record["merges"]
    ]


def _measured(row: Record, measures: Sequence[Metric]) -> str:
    """The validation loss, then the task's other measures that have a plot, with their names."""
    texts = [
        f"{measure.label} {measure.text(row.get(validation(measure).name))}"
        for measure in measures
        if measure.panel
    ]
    return ", ".join(texts).removeprefix(f"{measures[0].label} ")


def _shown(record: Record, name: str) -> str:
    """A number of the round with its unit."""
    return ROUND[name].text(record[name])


def _first_to_last(metric: Metric, records: Sequence[Record], summary: dict[str, Any]) -> str:
    first = next((number for numbers in values(metric, records) for number in numbers), None)
    final, best = summary[f"final_{metric.name}"], summary[f"best_{metric.name}"]
    final, best, first = (metric.text(value) for value in (final, best, first))
    return f"{metric.label} {final} (best {best}, first {first})"


def _batch(row: Record) -> str:
    """The requested batch, and the trained one if it differs: clipped to what fits, or raised."""
    requested, trained = row["requested_batch"], row["trainer_batch"]
    return str(requested) if trained == requested else f"{requested} ({trained} trained)"


def _rows(read: int | None, per_second: float | None) -> str:
    """The rows of a stream read so far, and per second; empty without a stream."""
    return "" if read is None else f"{read:,} rows read, {per_second:,.0f} rows/s"


def _rounded(row: Record) -> str:
    """The samples that were added so that every rank has work; empty for none."""
    return f" ({row['rounded_up']} added)" if row["rounded_up"] else ""


def _sent(record: Record) -> str:
    """The bytes sent per worker, and those inside islands if there are any."""
    inside = f" + {_shown(record, 'bytes_inside')} inside" if record["bytes_inside"] else ""
    return f"{_shown(record, 'bytes_communicated')}{inside}"


def _compressed(syncs: Record, wire: str, after: str, before: str = "") -> str:
    """The wire format and its compression, for instance `int4, 7.5x`, between `before` and `after`;
    empty if nothing was compressed.
    """
    ratio = syncs["compression_ratio"]
    return "" if ratio is None or round(ratio, 1) == 1 else f"{before}{wire}, {ratio:.1f}x{after}"


def clock(seconds: float | None) -> str:
    """Minutes and seconds."""
    if seconds is None:
        return "-:--"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
