"""What a law of the loss (loss_law.py) takes from the folders of short runs.

A loss counts if the learning rate had fallen to its end, as at the end of a cosine, or had not
begun to fall, as with a constant rate or before the decay of wsd. Losses between depend on how far
the rate has fallen, so a cosine gives one loss. Losses of the first third of a run do not count,
because the start follows no power law; of losses close to each other the later one counts.

Runs have the same method if trainers, workers, outer step, wire format, streaming and merges are
equal. The batch rule is no part of it, because the law knows the batches that were trained; nor is
placement, because it changes no numbers.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.metrics import TRAINER, Record, values
from adloco.plan.loss_points import DISTINCT, LossPoint
from adloco.run.folder import RECIPE, SUMMARY, run_folder
from adloco.run.records import Records

FIRST_PART = 1 / 3
"""Part of a run whose losses do not count."""
EQUAL = ("model.", "task.", "data.", "evaluation.windows")
"""Settings without which losses cannot be compared."""
MAY_DIFFER = {
    "model.gradient_checkpointing",
    "data.cache",
    "data.path",
    "data.dataset",
    "data.factory",
    "data.arguments",  # The text behind these four is compared by its fingerprint.
}
UNKNOWN = ("inner.", "learning_rate.", "method.max_grad_norm", "run.precision")
"""Settings that change losses, but that the law does not know."""


@dataclass(frozen=True, kw_only=True)
class ShortRuns:
    """What short runs have measured."""

    points: tuple[LossPoint, ...]
    noise_scale: float | None
    """In samples: the median over runs of the median over a run's second half; None if no run has
    measured it. It grows as the loss falls.
    """
    tokens_per_sample: float
    assumptions: tuple[str, ...]
    """Sentences on settings that differ although the law does not know them."""


def read_short_runs(folders: Sequence[Path]) -> ShortRuns:
    """Read finished runs.

    Raises:
        ValueError: A folder has no finished run, or one without a loss that counts; or the runs
            differ in model, task, text or evaluation set.
    """
    require(bool(folders), "no short run was given; name the folders of finished runs")
    runs = {folder: _finished(folder) for folder in dict.fromkeys(folders)}
    settings = {folder: named_settings(recipe) for folder, recipe in runs.items()}
    for folder, named in settings.items():
        if not runs[folder].data.streaming:
            named["data.fingerprint"] = json.loads((folder / SUMMARY).read_text()).get("corpus")
    for name in _differing(settings, EQUAL, MAY_DIFFER):
        found = {str(named.get(name)): folder for folder, named in settings.items()}
        (one, first), (other, second) = list(found.items())[:2]
        raise ValueError(
            f"short runs must share model, task, text and evaluation set, but {name} is {one} in "
            f"{first} and {other} in {second}; leave one of them out"
        )
    unknown = _differing(settings, UNKNOWN, {"learning_rate.total_tokens"})
    records = {folder: Records(folder).read() for folder in runs}
    scales = [scale for each in records.values() if (scale := _noise_scale(each)) is not None]
    last = next(iter(records.values()))[-1]
    return ShortRuns(
        points=tuple(
            point
            for folder, recipe in runs.items()
            for point in _points(str(folder), recipe, records[folder])
        ),
        noise_scale=statistics.median(scales) if scales else None,
        tokens_per_sample=last["tokens"] / last["samples"],
        assumptions=(f"what {', '.join(unknown)} change between runs counts as noise",)
        if unknown
        else (),
    )


def method_of(recipe: Recipe) -> str:
    """The method of a recipe: its trainers and workers, and the settings of outer step, wire
    format, streaming and merges that are not the defaults.
    """
    shape = recipe.method
    workers = f"{shape.workers_per_trainer} worker{'s' if shape.workers_per_trainer > 1 else ''}"
    sections = ["outer."]
    sections += ["wire."] if recipe.wire_format else []
    sections += ["streaming."] if recipe.syncs and recipe.streaming.fragments > 1 else []
    sections += ["merge."] if shape.num_trainers > 1 else []
    usual = named_settings(build_recipe({}))
    changed = [
        f"{name} {value}"
        for name, value in named_settings(recipe).items()
        if name.startswith(tuple(sections)) and name != "outer.on_host"
        if usual.get(name) != value
    ]
    trainers = f"{shape.num_trainers} trainers of " if shape.num_trainers > 1 else ""
    return ", ".join([trainers + workers, *changed])


def sync_every_of(recipe: Recipe) -> int:
    """H; 1 if it changes nothing, because a lone worker becomes its own mean."""
    alone = not recipe.syncs and named_settings(recipe)["outer.update"] == "mean"
    return 1 if alone else recipe.method.sync_every


def _finished(folder: Path) -> Recipe:
    path = run_folder(folder)
    require(
        (path / SUMMARY).is_file(),
        f"the run in {str(folder)!r} has not ended (no {SUMMARY} in it); finish it with: adloco "
        f"train --resume {folder}",
    )
    return build_recipe(read_values(str(path / RECIPE)))


def _differing(
    settings: Mapping[Path, Mapping[str, Any]], beginnings: tuple[str, ...], without: set[str]
) -> list[str]:
    """Names of settings that begin so and differ between runs."""
    names = dict.fromkeys(name for named in settings.values() for name in named)
    return [
        name
        for name in names
        if name.startswith(beginnings)
        and name not in without
        and len({str(named.get(name)) for named in settings.values()}) > 1
    ]


def _points(run: str, recipe: Recipe, records: Sequence[Record]) -> list[LossPoint]:
    """A run's losses that count."""
    schedule, batches = recipe.learning_rate, Counter[float]()
    end = records[-1]["tokens"]
    start = max(FIRST_PART * end, schedule.warmup_fraction * schedule.total_tokens)
    points: list[LossPoint] = []
    before = 0
    for record in records:
        tokens, loss = record["tokens"], record.get("val_loss")
        sizes = [trainer["trainer_batch"] for trainer in record["trainers"]]
        for size in sizes:
            batches[size] += (tokens - before) * size / sum(sizes)
        before = tokens
        annealed = schedule.shape != "constant" and tokens >= schedule.total_tokens
        if loss is None or tokens < start or not (annealed or schedule.decay(tokens) == 1):
            continue
        points.append(
            LossPoint(
                run=run,
                method=method_of(recipe),
                tokens=tokens,
                loss=loss,
                batch=dict(batches),
                sync_every=sync_every_of(recipe),
                annealed=annealed,
            )
        )
    require(
        bool(points),
        f"the run in {run!r} has no loss that counts: it was not evaluated, or its learning rate "
        "was still falling when it ended; leave it out, or train it to the end of its schedule",
    )
    kept = points[-1:]
    for point in reversed(points):
        if point.annealed != kept[0].annealed or point.tokens * DISTINCT <= kept[0].tokens:
            kept.insert(0, point)
    return kept


def _noise_scale(records: Sequence[Record]) -> float | None:
    """In samples, the median over the second half of a run; None if it was not measured."""
    half = [record for record in records if 2 * record["tokens"] >= records[-1]["tokens"]]
    found = [scale for scales in values(TRAINER["noise_scale"], half) for scale in scales]
    return statistics.median(found) if found else None
