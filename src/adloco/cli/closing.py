"""The last lines of `adloco train` for a finished run: what came out, and what to do next."""

from collections.abc import Sequence
from typing import Any

from adloco.cli.run_text import (
    clock,
    interruptions_text,
    measured_text,
    saved_text,
    sent_text,
    wire_name,
    wire_text,
)
from adloco.metrics import ROUND, Metric, Record, validation, values
from adloco.report.page import PAGE
from adloco.report.readable import counted, span
from adloco.rules.outcome import of_newest_text
from adloco.run.folder import shell_word
from adloco.run.training_run import TrainingRun

SHOWN_OF_SAMPLE = 160
"""Characters of the text sample that are shown; the report has all of it."""


def closing_lines(
    run: TrainingRun, summary: dict[str, Any], records: Sequence[Record]
) -> list[str]:
    """Lines about a finished run: its results, its report and next commands."""
    last = records[-1]
    merges = sum(len(record["merges"]) for record in records)
    rows = [row for record in records for row in record["trainers"]]
    memory = max(record["memory_bytes"] for record in records)
    folder = shell_word(run.folder)
    sample = summary["sample"]
    generate = [f"  adloco generate {folder} --prompt 'Some text'"] * run.recipe.task.generates
    return [
        "; ".join(
            _first_to_last(validation(measure), records, summary)
            for measure in run.recipe.task.measures
            if measure.leading and summary[f"final_{validation(measure).name}"] is not None
        ),
        *_islands(last, run.recipe.task.measures),
        f"{summary['tokens']:,} tokens in {counted(summary['rounds'], 'round')} and "
        f"{clock(summary['seconds'])}: {summary['tokens'] / summary['seconds']:,.0f} tokens/s with "
        f"evaluation and checkpoints, {ROUND['memory_bytes'].text(memory)} of memory at most",
        f"batch: {span([row['requested_batch'] for row in rows])} samples requested, "
        f"{span([row['trainer_batch'] for row in rows])} used; {counted(merges, 'merge')}, "
        f"{counted(len(last['trainers']), 'trainer')} in the last round",
        _sent(run, summary),
        *filter(None, [interruptions_text(run.starts.lines, summary["seconds"])]),
        *([_sample_text(sample)] if sample else []),
        "the report of the run, with charts, is",
        f"  {run.folder / PAGE}",
        "next, for instance:",
        *generate,
        f"  adloco compare {folder} OTHER_RUN_OR_RECIPE",
    ]


def _islands(last: Record, measures: Sequence[Metric]) -> list[str]:
    """A line about the text of each island, if islands have their own."""
    found = [f"{row['island']} {measured_text(row, measures)}" for row in last.get("islands", ())]
    return [f"on the text of each island: {'; '.join(found)}"] if found else []


def _sent(run: TrainingRun, summary: dict[str, Any]) -> str:
    last = run.newest
    if not last["bytes_communicated"]:
        inside = f"; {sent_text(last)}" if last["bytes_inside"] else ""
        return f"nothing was sent between workers{inside}"
    took = (
        f"; syncs took {summary['exposed_seconds']:,.1f} s without training, "
        f"{summary['hidden_seconds']:,.1f} s of transfers were hidden behind it"
    )
    return (
        f"{sent_text(last)} sent per worker in {counted(summary['syncs'], 'sync')}"
        f"{wire_text(summary, wire_name(run), ')', ' (')}: {saved_text(last)}"
        f"{took if summary['syncs'] else ''}"
    )


def _sample_text(sample: dict[str, str]) -> str:
    """The sample on one line."""
    begun, text = (" ".join(sample[name].split()) for name in ("prompt", "text"))
    return f"the model continues \u201c{begun}\u201d with \u201c{text[:SHOWN_OF_SAMPLE]}\u201d"


def _first_to_last(metric: Metric, records: Sequence[Record], summary: dict[str, Any]) -> str:
    alike = of_newest_text(records)
    first = next((number for numbers in values(metric, alike) for number in numbers), None)
    final, best = summary[f"final_{metric.name}"], summary[f"best_{metric.name}"]
    final, best, first = (metric.text(value) for value in (final, best, first))
    return f"{metric.label} {final} (best {best}, first {first})"
