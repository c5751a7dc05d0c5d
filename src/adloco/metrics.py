"""The numbers of metrics.jsonl: each is described once, in the tables below or by its task.

Most numbers begin in a worker's `WorkerRound` (`algorithms/worker_round.py`), which all ranks
gather, others in a trainer's controller, the counts of traffic, and the options;
`algorithms/make_reports.py` computes the reports from these, and `round_record`
(`run/round_numbers.py`) copies fields of reports by name into a line of metrics.jsonl, with a few
that the run adds. Records, summary, report, view and trackers use these tables: the page has a
chart of each metric with a `panel`, whose titles and texts are in `report/panels.py`. A test
compares docs/run-folder.md with the tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adloco.metric import COUNT, MEMORY, NATS, RATIO, SAMPLES, SECONDS, TOKENS, TRAFFIC, Per
from adloco.metric import Metric as Metric
from adloco.metric import Record as Record
from adloco.metric import Unit as Unit
from adloco.options import option_metrics

SHARE = Unit("share", ".1f", shown="%", scale=0.01)
RELATIVE_NORM = replace(SHARE, name="relative norm")


def _table(per: Per, *metrics: Metric) -> dict[str, Metric]:
    return {metric.name: replace(metric, per=per) for metric in metrics}


ROUND = _table(
    "round",
    Metric("round", "round", COUNT, always=True),
    Metric("tokens", "tokens", TOKENS, always=True),
    Metric("samples", "samples", SAMPLES, always=True),
    Metric("inner_steps", "inner steps", COUNT, always=True),
    Metric("syncs", "syncs", COUNT, always=True),
    Metric("sync_every", "inner steps per round (H)", COUNT),
    Metric("bytes_communicated", "sent per worker", TRAFFIC, panel="communication", always=True),
    Metric("bytes_sent", "sent per worker over links", TRAFFIC, always=True),
    Metric(
        "bytes_inside", "sent inside islands, per rank", TRAFFIC, panel="communication", always=True
    ),
    Metric("bytes_checkpoint", "of checkpoints, between islands", TRAFFIC, always=True),
    Metric(
        "bytes_ddp_equivalent",
        "data-parallel training would send",
        TRAFFIC,
        panel="communication",
        always=True,
    ),
    Metric("seconds", "time", SECONDS, always=True),
    Metric("tokens_per_second", "tokens/s", Unit("tokens/s", ",.0f"), always=True),
    Metric("mfu", "MFU", SHARE),
    Metric("rows_read", "rows read", Unit("rows")),
    Metric("train_loss", "train loss", NATS, panel="loss"),
    Metric("learning_rate", "learning rate", Unit("", ".2e")),
    Metric("memory_bytes", "peak memory", MEMORY, always=True),
)
SYNC = _table(
    "sync",
    Metric(
        "bytes",
        "per sync and worker",
        replace(TRAFFIC, form=",.2f"),
        aggregation="mean",
        always=True,
    ),
    Metric("compression_ratio", "compressed by", RATIO, aggregation="mean by bytes"),
    Metric(
        "exposed_seconds",
        "exposed: training waits",
        SECONDS,
        aggregation="sum",
        panel="wire",
        always=True,
    ),
    Metric(
        "hidden_seconds",
        "hidden: training runs",
        SECONDS,
        aggregation="sum",
        panel="wire",
        always=True,
    ),
    Metric("transfer_seconds", "transfers", SECONDS, aggregation="sum", always=True),
    Metric(
        "peak_bytes_per_second",
        "rate of sending, peak",
        Unit("bytes/s", ",.1f", shown="MB/s", scale=1e6),
        aggregation="max",
    ),
)
TRAINER = _table(
    "trainer",
    Metric("trainer", "trainer", COUNT, always=True),
    Metric("workers", "workers", COUNT, panel="trainers", always=True),
    Metric("requested_batch", "requested batch", SAMPLES, panel="batch", always=True),
    Metric("worker_batch", "batch of its first worker", SAMPLES, always=True),
    Metric("micro_batch", "micro-batch", SAMPLES, always=True),
    Metric("accumulation_steps", "accumulation steps", COUNT, panel="batch", always=True),
    Metric("trainer_batch", "batch as trained", SAMPLES, panel="batch", always=True),
    Metric("rounded_up", "added", SAMPLES, always=True),
    Metric("grad_variance", "S, variance of the gradient", Unit("", ".3g"), panel="noise_scale"),
    Metric("grad_norm_sq", "|G|², its squared norm", Unit("", ".3g"), panel="noise_scale"),
    Metric("noise_scale", "noise scale", Unit("samples", ",.1f"), panel="noise_scale"),
    Metric("noise_scale_factor", "known to within a factor of", Unit("", ",.2f")),
    Metric("measured_grad_variance", "S, last tests", Unit("", ".3g"), panel="noise_scale"),
    Metric("measured_grad_norm_sq", "|G|², last tests", Unit("", ".3g"), panel="noise_scale"),
    Metric("train_loss", "train loss", NATS),
    Metric("learning_rate", "learning rate", Unit("", ".2e")),
    Metric(
        "cosine_similarity", "cosine of workers' pseudo-gradients", Unit("", ".2f"), panel="wire"
    ),
    Metric("wire_error", "lost by the wire format", RELATIVE_NORM, panel="wire"),
    Metric("distance_to_mean", "distance to the mean", RELATIVE_NORM, panel="trainers"),
)
WORKER = _table(
    "worker",
    Metric("worker", "worker", COUNT, always=True),
    Metric("trainer", "trainer", COUNT, always=True),
    Metric("worker_batch", "batch of a worker", SAMPLES, panel="workers", always=True),
    Metric("busy_seconds", "inner steps", SECONDS, always=True),
    Metric("wait_seconds", "waiting per round", SECONDS, panel="workers", always=True),
    Metric("skipped_steps", "steps left out", COUNT, aggregation="sum", always=True),
    Metric("restarts", "restarts of workers", COUNT, aggregation="sum", always=True),
    *option_metrics().values(),
)
PHASE = _table(
    "phase",
    Metric("peak_bytes", "peak memory", MEMORY, panel="memory"),
    Metric("current_bytes", "held at the end of the phase", MEMORY, panel="memory"),
)
METRICS = tuple(
    metric for table in (ROUND, SYNC, TRAINER, WORKER, PHASE) for metric in table.values()
)


def change_text(change: Record) -> str:
    """A changed setting with its values, for instance `pass_limit 8 -> 4`."""
    return f"{change['setting']} {change['before']:,} -> {change['after']:,}"


def clipped_by(row: Mapping[str, Any], cap: int | None) -> str:
    """The setting that cut a trainer's batch in a round; empty if none did.

    It is `switch.max_micro_batch` if the trainer took less than it requested, because no more fits
    in one pass, and `batch.maximum` if it cannot request more.

    Args:
        row: The trainer in a line.
        cap: `batch.maximum` if a batch rule that measures gradients decides the batch; None for a
            rule that follows a plan.
    """
    if row["trainer_batch"] < row["requested_batch"]:
        return "switch.max_micro_batch"
    capped = cap is not None and row["trainer_batch"] == row["requested_batch"] >= cap
    return "batch.maximum" if capped else ""


def validation(measure: Metric, per: Per = "round") -> Metric:
    """The metric `val_NAME` under which a task's measure is recorded.

    per: "round" for the best trainer's value, "trainer" for each trainer's, "island" for that of
        each island's text.
    """
    name, label = f"val_{measure.name}", f"validation {measure.label}"
    return replace(measure, name=name, label=label, per=per)


def known_measures(measures: Sequence[Metric], records: Sequence[Record]) -> list[Metric]:
    """The loss, and the other measures that follow from it or that some record has: with some
    tokenizers there are no others.

    measures: What the task measures in an evaluation, the loss first.
    """
    loss, *others = measures
    known = [
        measure
        for measure in others
        if measure.of_loss
        or any(record.get(validation(measure).name) is not None for record in records)
    ]
    return [loss, *known]


def rows(record: Record, per: Per) -> list[Mapping[str, Any]]:
    """The parts of a line that have the numbers of `per`: one for the round or its syncs, else one
    for each trainer, worker, island or phase.
    """
    match per:
        case "round":
            return [record]
        case "sync":
            return [record["sync"]]
        case "phase":
            return list(record["memory"].values())
        case _:
            return list(record.get(f"{per}s", ()))  # Other runs have no islands.


def values(
    metric: Metric, records: Sequence[Record], number: int | str | None = None
) -> list[list[Any]]:
    """The metric's numbers in each round, without null.

    number: The trainer, worker or island whose numbers to take; None for all.
    """
    name, per = metric.name, metric.per
    return [
        [
            row[name]
            for row in rows(record, per)
            if row.get(name) is not None and (number is None or row[per] == number)
        ]
        for record in records
    ]


def aggregate(metric: Metric, records: Sequence[Record]) -> Any:
    """The metric's number for the whole run, see `Aggregation`; None if no round has one."""
    found = [numbers for numbers in values(metric, records) if numbers]
    every = [number for numbers in found for number in numbers]
    match metric.aggregation:
        case "last":
            return _mean(found[-1]) if found else None
        case "mean":
            return _mean([number for number in every if number])
        case "mean by bytes":
            sizes = [
                (record["sync"]["bytes"], number)
                for record, numbers in zip(records, values(metric, records), strict=True)
                for number in numbers
            ]
            return (
                sum(size * number for size, number in sizes) / sum(size for size, _ in sizes)
                if sizes
                else None
            )
        case "sum":
            return sum(every)
        case "max":
            return max(every, default=None)


def _mean(numbers: Sequence[Any]) -> Any:
    if len(numbers) < 2:
        return numbers[0] if numbers else None  # A count stays a whole number.
    return sum(numbers) / len(numbers)
