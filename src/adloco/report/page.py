"""Writes report.html, one self-contained page: charts, merges, rounds and settings of a run."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import settings, value_text
from adloco.config.sections import Recipe
from adloco.discovery import lab_modules
from adloco.errors import require
from adloco.metrics import (
    ROUND,
    SYNC,
    TRAINER,
    Metric,
    Record,
    aggregate,
    change_text,
    clipped_by,
    known_measures,
    rows,
    validation,
)
from adloco.options import signs_of_options
from adloco.report.curves import Panel
from adloco.report.html import write_page
from adloco.report.interruptions import interruption_cards, interruption_table
from adloco.report.loss_panel import loss_panel
from adloco.report.panels import run_panels
from adloco.report.readable import TIMES, readable, span
from adloco.report.step_losses import step_losses
from adloco.report.table import Table, table_of
from adloco.rules.failure_signs import all_signs
from adloco.rules.outcome import no_success
from adloco.run.budget import part_used
from adloco.run.changes import read_changes
from adloco.run.folder import ENVIRONMENT, RECIPE, SUMMARY
from adloco.run.json_files import read_json
from adloco.run.records import Records
from adloco.run.starts import Start, read_starts

ROWS = 60
"""About as many rounds are in the table; those of a longer run are evenly spaced."""

PAGE = "report.html"
"""The page, in the run's folder."""

Card = tuple[str, str]
"""A label and its number."""


def write_report(folder: Path) -> list[Panel]:
    """Write `PAGE` of a run, finished or not, from the files in its folder; return its charts.

    Raises:
        ValueError: The run has no finished round.
    """
    records = Records(folder).read_whole()
    require(bool(records), f"{folder} has no finished round to report; train it first")
    recipe = build_recipe(read_values(str(folder / RECIPE)))
    declared = known_measures(recipe.task.measures, records)
    steps = step_losses(records, Records(folder).steps())
    panels = [loss_panel(declared, records, steps), *run_panels(records, recipe.task.measures[0])]
    environment, summary = (_read(folder / name) for name in (ENVIRONMENT, SUMMARY))
    starts = read_starts(folder)
    of_options = [table for option in lab_modules("page") for table in option.content(folder)]
    values = list(settings(recipe))
    run_tables = (_merges(records), _changes(records), interruption_table(starts))
    write_page(
        folder / PAGE,
        panels,
        {
            "name": recipe.run.name,
            "folder": folder.resolve().name,
            "facts": [_layout(recipe), _origin(environment, starts, records)],
            "unfinished": "" if summary else _unfinished(recipe, records[-1]),
            "no_success": no_success(records),
            "cards": [
                run_cards(declared, records),
                _sync_cards(records),
                interruption_cards(starts, records[-1]["seconds"]),
            ],
            "signs": all_signs(records, recipe.batch_cap, signs_of_options()),
            "sample": _mapping(summary, "sample"),
            "tables": [*(table for table in run_tables if table.rows), *of_options],
            "resumed_with": [change.text for change in read_changes(folder)],
            "rounds": _rounds(recipe, declared, records),
            "changed": [one for one in values if one.default not in (None, one.value)],
            "as_default": [one for one in values if one.default in (None, one.value)],
            "shown": value_text,
            "environment": list(environment.items()),
        },
    )
    return panels


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a JSON object; empty if it is missing or something else."""
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _layout(recipe: Recipe) -> str:
    method = recipe.method
    return (
        f"trainers: {method.num_trainers}, workers of each: {method.workers_per_trainer}, "
        f"inner steps per round: {method.sync_every}"
        + (", more as the learning rate falls" if method.sync_growth else "")
    )


def _origin(
    environment: Mapping[str, Any], starts: Sequence[Start], records: Sequence[Record]
) -> str:
    """Date, code, machine and duration of a run's training, as far as they are known."""
    began = f"{datetime.fromtimestamp(starts[0].time, UTC):%d %B %Y, %H:%M} UTC" if starts else ""
    versions, git = (_mapping(environment, name) for name in ("versions", "git"))
    version = f"adloco {versions['adloco']}" if "adloco" in versions else ""
    commit = f"commit {str(git['commit'])[:8]}" if "commit" in git else ""
    changed = " with changes" if commit and git.get("dirty") else ""
    on_cpu = environment.get("device_type") == "cpu" and "cores" in environment
    cores = f" ({environment['cores']} cores)" if on_cpu else ""
    device = f"{environment['device']}{cores}" if "device" in environment else ""
    took = f"{readable(records[-1]['seconds'], TIMES)} of training"
    return " · ".join(filter(None, [began, version, commit + changed, device, took]))


def _unfinished(recipe: Recipe, last: Record) -> str:
    part = part_used(recipe.run.limits, last)
    return f"This run has not finished: {part:.0%} of its budget is used." if part < 1 else ""


def run_cards(declared: Sequence[Metric], records: Sequence[Record]) -> list[Card]:
    """The numbers of a run at a glance."""
    last = records[-1]
    measures = [validation(measure) for measure in declared]
    sent = ["bytes_communicated"]
    sent += ["bytes_sent"] * (last["bytes_sent"] > 1.01 * last["bytes_communicated"])
    sent += ["bytes_inside"] * bool(last["bytes_inside"])
    communicated, whole = last["bytes_communicated"], last["bytes_ddp_equivalent"]
    fewer = whole / communicated if 0 < 2 * communicated < whole else 0.0
    return [
        *_numbers(measures, records),
        *_numbers([ROUND["tokens"], ROUND["seconds"]], records),
        ("rounds", f"{last['round']:,}"),
        ("syncs", f"{last['syncs']:,}"),
        *(
            (metric.label, span([row[metric.name] for r in records for row in r["trainers"]]))
            for metric in (TRAINER["requested_batch"], TRAINER["trainer_batch"])
        ),
        ("merges", str(sum(len(record["merges"]) for record in records))),
        *_numbers([ROUND[name] for name in sent], records),
        *[("beside data-parallel training with as many steps", f"{fewer:,.0f} times less")]
        * bool(fewer),
    ]


def _numbers(metrics: Sequence[Metric], records: Sequence[Record]) -> list[Card]:
    return [(metric.label, metric.text(aggregate(metric, records))) for metric in metrics]


def _sync_cards(records: Sequence[Record]) -> list[Card]:
    """The cards about syncs, without numbers that are 0; no cards if workers exchanged nothing."""
    metrics = [
        SYNC["bytes"],
        SYNC["compression_ratio"],
        TRAINER["wire_error"],
        TRAINER["cosine_similarity"],
        SYNC["exposed_seconds"],
        SYNC["hidden_seconds"],
        SYNC["peak_bytes_per_second"],
    ]
    shown = [metric for metric in metrics if aggregate(metric, records)]
    return _numbers(shown, records) if aggregate(SYNC["bytes"], records) else []


def _merges(records: Sequence[Record]) -> Table:
    found = [
        (
            record["round"],
            f"{record['tokens']:,}",
            f"trainer {merge['survivor']}",
            ", ".join(f"trainer {trainer}" for trainer in merge["absorbed"]),
            ", ".join(f"{trainer}: {weight:.3f}" for trainer, weight in merge["weights"].items()),
        )
        for record in records
        for merge in record["merges"]
    ]
    columns = ["round", "tokens", "survivor", "absorbed", "weights"]
    return table_of("Merges", "", columns, found)


def _changes(records: Sequence[Record]) -> Table:
    found = [
        (record["round"], f"{record['tokens']:,}", change_text(change), change["reason"])
        for record in records
        for change in record["changes"]
    ]
    columns = ["round", "tokens", "change", "reason"]
    return table_of("Settings that the run changed", "", columns, found)


def _rounds(recipe: Recipe, declared: Sequence[Metric], records: Sequence[Record]) -> Table:
    of_trainers = (
        *("requested_batch", "trainer_batch", "micro_batch", "accumulation_steps", "noise_scale"),
    )
    metrics = [
        *(ROUND[name] for name in ("round", "tokens", "train_loss")),
        *(metric for metric in map(validation, declared) if metric.leading),
        ROUND["learning_rate"],
        *(TRAINER[name] for name in of_trainers),
        *(ROUND[name] for name in ("bytes_communicated", "tokens_per_second")),
        *([ROUND["mfu"]] if records[-1]["mfu"] is not None else []),
    ]
    columns = [metric.label for metric in metrics]
    after = columns.index(TRAINER["trainer_batch"].label) + 1
    columns.insert(after, "clipped by")
    found = []
    for record in _spaced(records):
        row = [
            " / ".join(metric.text(row.get(metric.name)) for row in rows(record, metric.per))
            for metric in metrics
        ]
        why = [clipped_by(row, recipe.batch_cap) or "-" for row in record["trainers"]]
        row.insert(after, why[0] if len({*why}) == 1 else " / ".join(why))
        found.append(row)
    several = any(len(record["trainers"]) > 1 for record in records)
    each = "Numbers of several trainers have a / between them. " if several else ""
    return table_of("Rounds", f"{each}Click a heading to sort.", columns, found)


def _spaced(records: Sequence[Record]) -> list[Record]:
    """About `ROWS` evenly spaced records, the first and the last included."""
    step = max(1, -(-len(records) // ROWS))
    chosen = list(records[::step])
    return chosen if chosen[-1] is records[-1] else [*chosen, records[-1]]
