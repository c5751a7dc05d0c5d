"""report.html: one self-contained page with the pictures, the merges, the rounds and the settings of a run."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import settings
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.run.records import Record, Records, sync_totals

ROWS = 60
"""Rounds shown in the table; of longer runs evenly spaced ones."""


def write_report(folder: Path) -> Path:
    """Draw the plots and the page from the files of a run folder, finished or not."""
    from adloco.report.plots import draw_plots  # Late: matplotlib takes half a second, and most ranks draw nothing.

    records = Records(folder).read()
    require(bool(records), f"{folder} has no finished round to report; train it first")
    images = draw_plots(records, folder / "plots")
    recipe = build_recipe(read_values(str(folder / "recipe.toml")))
    described = folder / "environment.json"
    environment = json.loads(described.read_text()) if described.exists() else {}
    template = jinja2.Environment(loader=jinja2.PackageLoader("adloco.report"), autoescape=True, undefined=jinja2.StrictUndefined)
    page = template.get_template("report.html").render(_content(recipe, records, images, environment))
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _content(recipe: Recipe, records: Sequence[Record], images: Sequence[Path], environment: dict[str, Any]) -> dict[str, Any]:
    last = records[-1]
    losses = [record["val_loss"] for record in records if record["val_loss"] is not None]
    accuracies = [record["val_accuracy"] for record in records if record["val_accuracy"] is not None]
    ratio = last["bytes_ddp_equivalent"] / last["bytes_communicated"] if last["bytes_communicated"] else None
    method = recipe.method
    return {
        "name": recipe.run.name,
        "subtitle": f"trainers: {method.num_trainers}, workers of each: {method.workers_per_trainer}, inner steps per round: {method.sync_every}",
        "cards": [
            ("validation loss", f"{losses[-1]:.4f}" if losses else "-"),
            *([("accuracy", f"{accuracies[-1]:.1%}")] if accuracies else []),
            ("tokens", f"{last['tokens']:,}"),
            ("rounds", f"{last['round']:,}"),
            ("syncs", f"{last['syncs']:,}"),
            ("sent per worker", f"{last['bytes_communicated'] / 1e6:,.1f} MB"),
            *([("left each worker", f"{last['bytes_sent'] / 1e6:,.1f} MB")] if last["bytes_sent"] > 1.01 * last["bytes_communicated"] else []),
            ("less than DDP by", f"{ratio:,.0f} x" if ratio else "-"),
            *([("inside islands, per rank", f"{last['bytes_inside'] / 1e6:,.1f} MB")] if last["bytes_inside"] else []),
            ("merges", str(sum(len(record["merges"]) for record in records))),
            ("seconds", f"{last['seconds']:,.0f}"),
        ],
        "sync_cards": _sync_cards(records),
        "images": [{"name": image.stem, "data": base64.b64encode(image.read_bytes()).decode()} for image in images],
        "merges": [
            {
                "round": record["round"],
                "tokens": f"{record['tokens']:,}",
                "survivor": merge["survivor"],
                "absorbed": ", ".join(f"trainer {trainer}" for trainer in merge["absorbed"]),
                "weights": ", ".join(f"{trainer}: {weight:.3f}" for trainer, weight in merge["weights"].items()),
            }
            for record in records
            for merge in record["merges"]
        ],
        "columns": [
            "round",
            "tokens",
            "train loss",
            "val loss",
            "learning rate",
            "requested batch",
            "trained batch",
            "micro x steps",
            "noise scale",
            "sent MB",
            "tokens/s",
        ],
        "rows": [_row(record) for record in _spaced(records)],
        "settings": list(settings(recipe)),
        "environment": list(environment.items()),
    }


def _sync_cards(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the rounds' syncs took; nothing where workers exchanged nothing."""
    totals = sync_totals(records)
    if totals.bytes_per_round is None:
        return []
    seconds = totals.hidden_seconds + totals.exposed_seconds
    peak = totals.peak_bytes_per_second
    return [
        ("per sync and worker", f"{totals.bytes_per_round / 1e6:,.2f} MB"),
        ("compressed by", f"{totals.compression_ratio:,.1f} x"),
        *([("lost on the wire, at the end", f"{totals.wire_error:.1%}")] if totals.wire_error else []),
        *([("cosine of workers, at the end", f"{totals.cosine_similarity:.2f}")] if totals.cosine_similarity is not None else []),
        ("seconds in syncs", f"{seconds:,.1f}"),
        *([("of these hidden", f"{totals.hidden_seconds / seconds:.0%}")] if totals.hidden_seconds else []),
        *([("rate of sending, peak", f"{peak / 1e6:,.1f} MB/s")] if peak is not None else []),
    ]


def _row(record: Record) -> list[str]:
    trainers = record["trainers"]
    return [
        str(record["round"]),
        f"{record['tokens']:,}",
        f"{record['train_loss']:.4f}",
        "-" if record["val_loss"] is None else f"{record['val_loss']:.4f}",
        f"{record['learning_rate']:.2e}",
        " / ".join(str(trainer["requested_batch"]) for trainer in trainers),
        " / ".join(str(trainer["trainer_batch"]) for trainer in trainers),
        " / ".join(f"{trainer['micro_batch']} x {trainer['accumulation_steps']}" for trainer in trainers),
        " / ".join("-" if trainer["noise_scale"] is None else f"{trainer['noise_scale']:.1f}" for trainer in trainers),
        f"{record['bytes_communicated'] / 1e6:.1f}",
        f"{record['tokens_per_second']:,.0f}",
    ]


def _spaced(records: Sequence[Record]) -> list[Record]:
    step = max(1, -(-len(records) // ROWS))
    chosen = list(records[::step])
    return chosen if chosen[-1] is records[-1] else [*chosen, records[-1]]
