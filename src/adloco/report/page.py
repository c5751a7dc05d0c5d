"""Writes report.html: one self-contained page with the plots, the merges, the rounds and the
settings of a run.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import settings
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.metrics import (
    ROUND,
    SYNC,
    TRAINER,
    Metric,
    Record,
    aggregate,
    change_text,
    known_measures,
    rows,
    validation,
)
from adloco.report.curves import Curve, curve_content
from adloco.report.html import embedded, write_page
from adloco.report.interruptions import interruption_cards, interruption_tables
from adloco.report.step_losses import StepLosses, step_losses, steps_per_point
from adloco.rules.failure_signs import all_signs
from adloco.run.changes import read_changes
from adloco.run.records import Records, read_json
from adloco.run.starts import read_starts

ROWS = 60
"""About as many rounds are in the table; those of a longer run are evenly spaced."""


def write_report(folder: Path) -> Path:
    """Draw the plots and the page of a run, finished or not, from the files in its folder.

    Returns:
        The path of report.html.

    Raises:
        ValueError: The run has no finished round.
    """
    # Imported late: matplotlib takes half a second, and most ranks draw nothing.
    from adloco.report.gradient_plot import gradient_content
    from adloco.report.plots import draw_plots

    records = Records(folder).read_whole()
    require(bool(records), f"{folder} has no finished round to report; train it first")
    recipe = build_recipe(read_values(str(folder / "recipe.toml")))
    steps = step_losses(records, Records(folder).steps())
    images = draw_plots(records, steps, folder / "plots", recipe.task.measures)
    described = folder / "environment.json"
    environment = read_json(described) if described.exists() else {}
    path = folder / "report.html"
    content = _content(recipe, records, steps, images, environment)
    content["folder"] = folder.resolve().name
    content["resumed_with"] = [change.text for change in read_changes(folder)]
    starts = read_starts(folder)
    content["interruption_cards"] = interruption_cards(starts, records[-1]["seconds"])
    content["interruption_tables"] = interruption_tables(starts)
    write_page(path, "report.html", content | {"gradients": gradient_content(folder)})
    return path


def _content(
    recipe: Recipe,
    records: Sequence[Record],
    steps: Sequence[StepLosses],
    images: Sequence[Path],
    environment: dict[str, Any],
) -> dict[str, Any]:
    last = records[-1]
    declared = known_measures(recipe.task.measures, records)
    measures = [validation(measure) for measure in declared]
    shown = [measure for measure in measures if measure.leading]
    ratio = (
        last["bytes_ddp_equivalent"] / last["bytes_communicated"]
        if last["syncs"] and last["bytes_communicated"]
        else None
    )
    of_trainers = (
        "requested_batch",
        "trainer_batch",
        "micro_batch",
        "accumulation_steps",
        "noise_scale",
    )
    columns = [
        *(ROUND[name] for name in ("round", "tokens", "train_loss")),
        *shown,
        ROUND["learning_rate"],
        *(TRAINER[name] for name in of_trainers),
        *(ROUND[name] for name in ("bytes_communicated", "tokens_per_second")),
    ]
    method = recipe.method
    return {
        "name": recipe.run.name,
        "subtitle": f"trainers: {method.num_trainers}, "
        f"workers of each: {method.workers_per_trainer}, "
        f"inner steps per round: {method.sync_every}",
        "cards": [
            *_cards(
                [
                    *measures,
                    *(ROUND[name] for name in ("tokens", "round", "syncs", "bytes_communicated")),
                ],
                records,
            ),
            *_cards(
                [ROUND["bytes_sent"]]
                if last["bytes_sent"] > 1.01 * last["bytes_communicated"]
                else [],
                records,
            ),
            ("less than DDP by", f"{ratio:,.0f} x" if ratio else "-"),
            *_cards([ROUND["bytes_inside"]] if last["bytes_inside"] else [], records),
            ("merges", str(sum(len(record["merges"]) for record in records))),
            *_cards([ROUND["seconds"]], records),
        ],
        "sync_cards": _sync_cards(records),
        "curves": _curves(declared, records, steps),
        "images": [
            # The curves show the measures already, where scripts run.
            embedded(image) | {"without_script": image.stem in {metric.panel for metric in shown}}
            for image in images
        ],
        "signs": all_signs(records, recipe.batch_cap),
        "merges": [
            {
                "round": record["round"],
                "tokens": f"{record['tokens']:,}",
                "survivor": merge["survivor"],
                "absorbed": ", ".join(f"trainer {trainer}" for trainer in merge["absorbed"]),
                "weights": ", ".join(
                    f"{trainer}: {weight:.3f}" for trainer, weight in merge["weights"].items()
                ),
            }
            for record in records
            for merge in record["merges"]
        ],
        "changes": [
            {
                "round": record["round"],
                "tokens": f"{record['tokens']:,}",
                "change": change_text(change),
                "reason": change["reason"],
            }
            for record in records
            for change in record.get("changes", ())  # Older runs have none.
        ],
        "columns": [metric.label for metric in columns],
        "rows": [
            [
                " / ".join(metric.text(row.get(metric.name)) for row in rows(record, metric.per))
                for metric in columns
            ]
            for record in _spaced(records)
        ],
        "settings": list(settings(recipe)),
        "environment": list(environment.items()),
    }


def _curves(
    declared: Sequence[Metric], records: Sequence[Record], steps: Sequence[StepLosses]
) -> dict[str, Any]:
    """The measures and the training loss on every axis, to be looked at closely."""
    measures = [replace(validation(measure), label=measure.label) for measure in declared]
    names = ("tokens", "inner_steps", "round", "syncs", "bytes_sent", "seconds")
    axes = {name: ROUND[name] for name in names if records[-1][name]}
    numbers = {name: [record[name] for record in records] for name in axes}
    each = steps_per_point(records)
    return curve_content(
        axes,
        measures,
        [
            Curve(
                name="validation",
                detail="",
                axes=numbers,
                measures={
                    metric.name: [record.get(metric.name) for record in records]
                    for metric in measures
                },
                look="strong",
            ),
            Curve(
                name="train",
                detail="mean of the round",
                axes=numbers,
                measures=_in_training(measures, [record["train_loss"] for record in records]),
                look="grey",
            ),
            *(
                Curve(
                    name=f"steps of trainer {line.trainer}",
                    detail=f"mean of {each} inner steps" if each > 1 else "one inner step",
                    axes=line.axes,
                    measures=_in_training(measures, line.losses),
                    look="thin",
                )
                for line in steps
            ),
        ],
        "Validation and train are numbers at the end of each round. Steps are the training loss "
        f"of {'each inner step' if each == 1 else f'every {each} inner steps'} (mean over the "
        "samples of a trainer), shown where x counts tokens (of all trainers) or inner steps (of "
        "each worker).",
    )


def _in_training(
    measures: Sequence[Metric], losses: Sequence[float | None]
) -> dict[str, list[float | None]]:
    """The loss, and each measure that follows from it, of training."""
    loss, *others = measures
    return {loss.name: list(losses)} | {
        metric.name: [None if value is None else metric.of_loss(value) for value in losses]
        for metric in others
        if metric.of_loss
    }


def _cards(metrics: Sequence[Metric], records: Sequence[Record]) -> list[tuple[str, str]]:
    return [(metric.label, metric.text(aggregate(metric, records))) for metric in metrics]


def _sync_cards(records: Sequence[Record]) -> list[tuple[str, str]]:
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
    return _cards(
        [metric for metric in metrics if aggregate(metric, records)]
        if aggregate(SYNC["bytes"], records)
        else [],
        records,
    )


def _spaced(records: Sequence[Record]) -> list[Record]:
    """About `ROWS` evenly spaced records, the first and the last included."""
    step = max(1, -(-len(records) // ROWS))
    chosen = list(records[::step])
    return chosen if chosen[-1] is records[-1] else [*chosen, records[-1]]
