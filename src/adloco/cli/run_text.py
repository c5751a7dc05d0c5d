"""What is said of a run in plain text: a round, its events and evaluations, and a summary."""

from collections.abc import Sequence
from typing import Any

from adloco.config.recipe_text import named_settings
from adloco.metrics import ROUND, WORKER, Metric, Record, change_text, validation, values
from adloco.run.starts import Start, losses
from adloco.run.training_run import TrainingRun

GATED = ("relative_norm", "cosine_with_others")
"""Numbers by which the gate leaves a worker out."""


def summary_lines(run: TrainingRun, summary: dict[str, Any]) -> list[str]:
    """Five lines about a finished run, one about its interruptions if there were any, one that
    names its files, and one with a next command.
    """
    last = run.history[-1]
    merges = sum(len(record["merges"]) for record in run.history)
    batches = [row["requested_batch"] for record in run.history for row in record["trainers"]]
    ratio = (
        f", {last['bytes_ddp_equivalent'] / summary['bytes']:,.0f}x less than DDP"
        if summary["syncs"]
        else ""
    )
    shrunk = wire_text(summary, wire_name(run), "", ", ")
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
            if measure.leading and summary[f"final_{validation(measure).name}"] is not None
        ),
        f"{summary['tokens']:,} tokens in {summary['rounds']} rounds, "
        f"{clock(summary['seconds'])}, {summary['num_parameters']:,} parameters",
        f"requested batch {min(batches)} to {max(batches)} samples, {merges} merges, "
        f"{len(last['trainers'])} trainers in the last round",
        f"{summary['syncs']} syncs, {sent_text(last)} sent per worker{shrunk}{ratio}{seconds}",
        f"{summary['tokens'] / summary['seconds']:,.0f} tokens/s with evaluation and checkpoints, "
        f"{number_text(last, 'memory_bytes')} at most",
        *filter(None, [interruptions_text(run.starts.lines, summary["seconds"])]),
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
        f"t{row['trainer']} batch {batch_text(row)} = {row['workers']}w x "
        f"{row['micro_batch']}x{row['accumulation_steps']}{rounded_text(row)}"
        for row in record["trainers"]
    )
    loss = "" if record["val_loss"] is None else f" val {measured_text(record, measures)}"
    return (
        f"round {record['round']:>4}  {record['tokens']:>10,} tokens  train "
        f"{number_text(record, 'train_loss')}{loss}  {trainers}"
        f"  sent {sent_text(record)} ({wire_text(record['sync'], wire, '; ')}DDP "
        f"{number_text(record, 'bytes_ddp_equivalent')})"
        f"  {number_text(record, 'tokens_per_second')} tok/s  "
        f"{rows_text(record['rows_read'], record['rows_per_second'])}"
    ).rstrip()


def evaluation_text(record: Record, measures: Sequence[Metric]) -> str:
    """The validation of each trainer in one line; empty if only one trainer was evaluated."""
    found = [
        f"trainer {row['trainer']} {measured_text(row, measures)}"
        for row in record["trainers"]
        if row["val_loss"] is not None
    ]
    return f"round {record['round']}: validation, {'; '.join(found)}" if len(found) > 1 else ""


def wire_name(run: TrainingRun) -> str:
    """The run's `wire.format`."""
    name: str = named_settings(run.recipe)["wire.format"]
    return name


def event_texts(record: Record) -> list[str]:
    """What happened in a round besides training: memory that ran out, bad numbers, merges, changed
    settings.
    """
    limit = record["pass_limit"]
    ran_out = (
        [
            f"round {record['round']}: memory ran out; from here on with micro-batches of at most "
            f"{limit}"
        ]
        if limit
        else []
    )
    merged = [
        f"round {record['round']}: trainer {', '.join(map(str, merge['absorbed']))} merged into "
        f"trainer {merge['survivor']}, weights "
        + ", ".join(f"{trainer}: {weight:.2f}" for trainer, weight in merge["weights"].items())
        for merge in record["merges"]
    ]
    changed = [
        f"round {record['round']}: {change_text(change)}: {change['reason']}"
        for change in record.get("changes", ())  # Older runs have none.
    ]
    spikes = [
        f"round {record['round']}: the loss of trainer {row['trainer']} at inner step "
        f"{row['spike_step']} was {row['spike_deviations']:.1f} deviations above its running mean"
        + ("; its round was rolled back" if row["rolled_back"] else "")
        for row in record["trainers"]
        if row.get("spikes")  # Older runs have none.
    ]
    return [*ran_out, *_bad_numbers(record), *spikes, *merged, *changed]


def _bad_numbers(record: Record) -> list[str]:
    """What was done about workers whose numbers were not finite, or far from the others'."""
    done = {
        "skipped_steps": "left out {} inner steps with a loss or gradient that is not finite",
        "restarts": "started again {} times from the parameters of the last sync, because its "
        "numbers were not finite",
        "syncs_left_out": "was left out of {} syncs, because its pseudo-gradient was far from the "
        "others': norm {} times the median, cosine {}",
    }
    return [
        f"round {record['round']}: worker {row['worker']} of trainer {row['trainer']} "
        + text.format(row[name], *(WORKER[key].text(row.get(key)) for key in GATED))
        for row in record["workers"]
        for name, text in done.items()
        if row.get(name)  # Older runs have none.
    ]


def interruptions_text(starts: Sequence[Start], seconds: float) -> str:
    """What the run has lost at its interruptions, in a line; empty if there were none.

    Args:
        starts: Its starts and stops.
        seconds: Of training that counts so far.
    """
    lost = losses(starts)
    times = "once" if lost.interruptions == 1 else f"{lost.interruptions} times"
    return (
        f"interrupted {times}: {lost.tokens_repeated:,} tokens repeated, "
        f"{lost.seconds_lost:,.1f} s lost, goodput {lost.goodput(seconds):.1%}"
        if lost.interruptions
        else ""
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


def _first_to_last(metric: Metric, records: Sequence[Record], summary: dict[str, Any]) -> str:
    first = next((number for numbers in values(metric, records) for number in numbers), None)
    final, best = summary[f"final_{metric.name}"], summary[f"best_{metric.name}"]
    final, best, first = (metric.text(value) for value in (final, best, first))
    return f"{metric.label} {final} (best {best}, first {first})"


def batch_text(row: Record) -> str:
    """The requested batch, and the trained one if it differs: clipped to what fits, or raised."""
    requested, trained = row["requested_batch"], row["trainer_batch"]
    return str(requested) if trained == requested else f"{requested} ({trained} trained)"


def rows_text(read: int | None, per_second: float | None) -> str:
    """The rows of a stream read so far, and per second; empty without a stream."""
    return "" if read is None else f"{read:,} rows read, {per_second:,.0f} rows/s"


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


def clock(seconds: float | None) -> str:
    """Minutes and seconds."""
    if seconds is None:
        return "-:--"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
