"""A run in plain text: a round, its events and its evaluations."""

from collections.abc import Sequence

from adloco.config.sections import WIRE_FORMATS
from adloco.metrics import ROUND, TRAINER, Metric, Record, change_text, validation
from adloco.options import options
from adloco.report.readable import counted
from adloco.run.starts import Start, failure_cost
from adloco.run.training_run import TrainingRun


def round_text(record: Record, wire: str, measures: Sequence[Metric]) -> str:
    """A round in one line.

    Args:
        wire: The value of `wire.format`, which encodes the pseudo-gradients.
        measures: What the task measures in an evaluation, the loss first.
    """
    trainers = " | ".join(
        f"trainer {row['trainer']}: batch {batch_text(row)} of {counted(row['workers'], 'worker')}"
        f" in micro-batches of {row['micro_batch']} x {row['accumulation_steps']}"
        f"{rounded_text(row)}"
        for row in record["trainers"]
    )
    loss = "" if record["val_loss"] is None else f" val {measured_text(record, measures)}"
    return (
        f"round {record['round']:>4}  {record['tokens']:>10,} tokens  train "
        f"{number_text(record, 'train_loss')}{loss}  {trainers}"
        f"  sent {sent_text(record)} ({wire_text(record['sync'], wire, '; ')}data-parallel "
        f"{number_text(record, 'bytes_ddp_equivalent')})"
        f"  {number_text(record, 'tokens_per_second')} tok/s{use_text(record)}  "
        f"{rows_text(record['rows_read'])}"
    ).rstrip()


def use_text(record: Record) -> str:
    """What a round took of a device; empty if its peak is not known, as of a CPU."""
    if record["mfu"] is None:
        return ""
    memory = number_text(record, "memory_bytes")
    return f", {number_text(record, 'mfu')} of the device's FLOPs, {memory} of memory"


def evaluation_text(record: Record, measures: Sequence[Metric]) -> str:
    """The validation of each trainer, or of each island's text, in one line; empty for only one."""
    found = [
        f"{per} {row[per]} {measured_text(row, measures)}"
        for per in ("trainer", "island")
        for row in record.get(f"{per}s", ())
        if row["val_loss"] is not None and (per == "island" or len(record["trainers"]) > 1)
    ]
    return f"round {record['round']}: validation, {'; '.join(found)}" if len(found) > 1 else ""


def wire_name(run: TrainingRun) -> str:
    """The run's `wire.format`."""
    return WIRE_FORMATS.name_of(type(run.recipe.wire))


def event_texts(record: Record) -> list[str]:
    """Events of a round besides training: bad numbers, merges, changed settings."""
    merged = [
        f"trainer {', '.join(map(str, merge['absorbed']))} merged into trainer "
        f"{merge['survivor']}, weights "
        + ", ".join(f"{trainer}: {weight:.2f}" for trainer, weight in merge["weights"].items())
        for merge in record["merges"]
    ]
    changed = [f"{change_text(change)}: {change['reason']}" for change in record["changes"]]
    of_options = [event for option in options().values() for event in option.events(record)]
    events = [*_bad_numbers(record), *of_options, *merged, *changed]
    return [f"round {record['round']}: {event}" for event in events]


def _bad_numbers(record: Record) -> list[str]:
    """Lines about workers whose numbers were not finite, and what was done."""
    done = {
        ("skipped_steps", "left out", "inner step"): "with a loss or gradient that is not finite",
        ("restarts", "started again", "time"): "from the parameters of the last sync, because its "
        "numbers were not finite",
    }
    return [
        f"worker {row['worker']} of trainer {row['trainer']} {did} {counted(row[name], what)} {why}"
        for row in record["workers"]
        for (name, did, what), why in done.items()
        if row[name]
    ]


def interruptions_text(starts: Sequence[Start], seconds: float) -> str:
    """Line about tokens and time lost at interruptions; empty if there were none.

    seconds: Of training that counts so far.
    """
    cost = failure_cost(starts, seconds)
    number = cost["interruptions"]
    if not number:
        return ""
    times = "once" if number == 1 else f"{number} times"
    return (
        f"interrupted {times}: {cost['tokens_repeated']:,} tokens repeated, "
        f"{cost['seconds_lost']:,.1f} s lost, goodput {cost['goodput']:.1%}"
    )


def measured_text(row: Record, measures: Sequence[Metric]) -> str:
    """The validation loss, then the task's other leading measures that the row has, by name."""
    texts = [
        f"{measure.short or measure.label} {measure.text(row[validation(measure).name])}"
        for measure in measures
        if measure.leading and row.get(validation(measure).name) is not None
    ]
    return ", ".join(texts).removeprefix(f"{measures[0].label} ")


def number_text(record: Record, name: str) -> str:
    """A number of the round with its unit."""
    return ROUND[name].text(record[name])


def batch_text(row: Record) -> str:
    """The requested batch, and the used one if it differs: clipped to what fits, or raised."""
    requested, used = row["requested_batch"], row["trainer_batch"]
    clipped = ": clipped" if used < requested else ""
    return str(requested) if used == requested else f"{requested} (used {used}{clipped})"


def noise_text(row: Record) -> str:
    """A trainer's noise scale, and the factor within which it is known."""
    text = TRAINER["noise_scale"].text(row["noise_scale"])
    factor = row["noise_scale_factor"]
    return f"{text} ±{factor:.1f}x" if factor else text


def rows_text(read: int | None) -> str:
    """The rows of a stream read so far; empty without a stream."""
    return "" if read is None else f"{read:,} rows read"


def rounded_text(row: Record) -> str:
    """The samples that were added so that every rank has work; empty for none."""
    return f" ({row['rounded_up']} added)" if row["rounded_up"] else ""


def sent_text(record: Record) -> str:
    """The bytes sent per worker, and those inside islands if there are any."""
    inside = f" + {number_text(record, 'bytes_inside')} inside" if record["bytes_inside"] else ""
    return f"{number_text(record, 'bytes_communicated')}{inside}"


def wire_text(syncs: Record, wire: str, after: str, before: str = "") -> str:
    """The wire format and its compression, for instance `int4, 7.5x`, between `before` and `after`;
    empty if nothing was compressed.
    """
    ratio = syncs["compression_ratio"]
    return "" if ratio is None or round(ratio, 1) == 1 else f"{before}{wire}, {ratio:.1f}x{after}"


def saved_text(record: Record) -> str:
    """Ratio of data-parallel training's bytes to the bytes sent, in words."""
    sent, whole = record["bytes_communicated"], record["bytes_ddp_equivalent"]
    if not 0 < 2 * sent < whole:
        return against_text(record)
    shown = number_text(record, "bytes_ddp_equivalent")
    return (
        f"{whole / sent:,.0f} times less than the {shown} that data-parallel training would have "
        "sent for as many steps"
    )


def against_text(record: Record) -> str:
    """Bytes that data-parallel training would have sent, in words."""
    whole = number_text(record, "bytes_ddp_equivalent")
    return f"data-parallel training would have sent {whole}"


def clock(seconds: float | None) -> str:
    """Minutes and seconds, and hours if there are any; `-:--` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
