"""Reads points for a law of the loss (loss_law.py) from the folders of short runs.

docs/plan.md says which losses count, and which runs have the same method. Losses of the first third
of a run do not count, because the start follows no power law; of losses close to each other the
later one counts. The batch rule is no part of the method, because the law knows the batches that
were trained; nor is placement, because it changes no numbers.
"""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.algorithms.optimizers import OuterMean
from adloco.config.finding import setting_facts
from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import defaults, named_settings
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.metrics import TRAINER, Record, values
from adloco.plan.loss_points import DISTINCT, LossPoint
from adloco.rules.outcome import of_newest_text
from adloco.run.changes import read_changes
from adloco.run.folder import RECIPE, SUMMARY, finished, run_folder
from adloco.run.json_files import read_json
from adloco.run.records import Records
from adloco.run.stored import check_code, check_written_records

FIRST_PART = 1 / 3
"""Part of a run whose losses do not count."""
LEAST_ROUNDS = 3
"""Rounds of a run that counts, if its workers exchange."""
EQUAL = ("model.", "task.", "data.", "evaluation.windows")
"""Settings without which losses cannot be compared."""
SHARED = ("model.", "task.", "data.context_tokens", "data.tokenizer")
"""Settings without which recipes say nothing of each other's loss."""
UNKNOWN = ("inner.", "learning_rate.", "method.max_grad_norm", "run.precision")
"""Settings that change losses, but that the law does not know."""


@dataclass(frozen=True, kw_only=True)
class ShortRuns:
    """Measurements of short runs."""

    points: tuple[LossPoint, ...]
    noise_scale: float | None
    """In samples: the median over runs of the median over a run's second half; None if no run has
    measured it. It grows as the loss falls.
    """
    recipe: Recipe
    """The first run's; all runs share model, task and text."""
    assumptions: tuple[str, ...]
    """Sentences on settings that differ although the law does not know them."""


def read_short_runs(folders: Sequence[Path]) -> ShortRuns:
    """Read finished runs.

    Raises:
        ValueError: A folder has no finished run, or one without a loss that counts, or records that
            were changed; or the runs differ in model, task, text or evaluation set.
    """
    for folder in folders:
        check_code(run_folder(folder))  # To build the recipe imports it.
        check_written_records(folder)
    runs = {
        folder: build_recipe(read_values(str(finished(folder) / RECIPE)))
        for folder in {path.resolve(): path for path in folders}.values()
    }
    settings = {folder: named_settings(recipe) for folder, recipe in runs.items()}
    for folder, named in settings.items():
        data = runs[folder].data
        summary = read_json(folder / SUMMARY)
        # What was read of a stream has no fingerprint that another run shares.
        named["data.fingerprint"] = data.name if data.streaming else summary.get("corpus")
        # No setting says what a model from Python is.
        named["model.num_parameters"] = summary.get("num_parameters")
        # The recipe has what a resume changed last, as if the run had begun with it.
        changes = {change.setting: change.text for change in read_changes(folder)}
        require(
            "method.sync_every" not in changes,
            f"{changes.get('method.sync_every')} in {folder}, and the law takes one H for each "
            "run; leave it out",
        )
        named |= changes
    for name in _differing(settings.values(), EQUAL, _may_differ()):
        found = {str(named.get(name)): folder for folder, named in settings.items()}
        (one, first), (other, second) = list(found.items())[:2]
        raise ValueError(
            f"short runs must share model, task, text and evaluation set, but {name} is {one} in "
            f"{first} and {other} in {second}; leave one of them out"
        )
    unknown = _differing(settings.values(), UNKNOWN, {"learning_rate.total_tokens"})
    every_record = {folder: Records(folder).read_whole() for folder in runs}
    records = {
        folder: found
        for folder, found in every_record.items()
        if found and found[-1]["inner_steps"] >= LEAST_ROUNDS * sync_every_of(runs[folder])
    }
    require(
        bool(records),
        f"all of these runs have fewer than {LEAST_ROUNDS} rounds of H inner steps; train longer "
        "ones, or take a smaller method.sync_every",
    )
    assumptions = []
    if len(records) < len(runs):
        assumptions.append(
            f"{len(runs) - len(records)} of {len(runs)} runs have fewer than {LEAST_ROUNDS} rounds "
            "and are left out: they would make a large H look worse than it is in longer runs."
        )
    if unknown:
        assumptions.append(f"What {', '.join(unknown)} change between runs counts as noise.")
    scales = [scale for each in records.values() if (scale := _noise_scale(each)) is not None]
    return ShortRuns(
        points=tuple(
            point
            for folder, found in records.items()
            for point in _points(str(folder), runs[folder], found)
        ),
        noise_scale=statistics.median(scales) if scales else None,
        recipe=next(iter(runs.values())),
        assumptions=tuple(assumptions),
    )


def check_shared_model(recipes: Sequence[Recipe], measured: Recipe | None) -> None:
    """Raise ValueError unless all candidates and the runs share model, task and context.

    measured: The recipe of short runs; None without them.
    """
    settings, free = [named_settings(recipe) for recipe in recipes], _may_differ()
    names = _differing(settings, SHARED, free)
    require(
        not names,
        f"candidates must share {', '.join(names)}; set what all are to have on the line, or plan "
        "them one by one",
    )
    names = _differing([settings[0], named_settings(measured)], SHARED, free) if measured else []
    require(
        not names,
        f"the runs and the planned recipes differ in {', '.join(names)}; give the settings of the "
        "runs to the plan too",
    )


def method_of(recipe: Recipe) -> str:
    """The method of a recipe, in words: its trainers and workers, and the kinds of outer step, wire
    format and merges with those of their settings that are not the defaults.
    """
    shape = recipe.method
    workers = f"{shape.workers_per_trainer} worker{'s' if shape.workers_per_trainer > 1 else ''}"
    words = [f"{shape.num_trainers} trainers of {workers}" if shape.num_trainers > 1 else workers]
    words += [f"{len(shape.dropped)} dropped"] if shape.dropped else []
    kinds = named_settings(recipe)
    words += [f"outer.update {kinds['outer.update']}", *_changed("outer", recipe.outer)]
    if recipe.syncs:
        words += [f"wire.format {kinds['wire.format']}", *_changed("wire", recipe.wire)]
        words += _changed("streaming", recipe.streaming)
    if shape.num_trainers > 1:
        words += [f"merge.policy {kinds['merge.policy']}", *_changed("merge", recipe.merge)]
        words += _changed("merge", recipe.fates)
    return ", ".join(words)


def sync_every_of(recipe: Recipe) -> float:
    """Mean H of a run; 1 if it changes nothing, because a lone worker becomes its own mean."""
    alone = not recipe.syncs and isinstance(recipe.outer, OuterMean)
    return 1 if alone else recipe.mean_sync_every


def _changed(section: str, part: Any) -> list[str]:
    """Settings of a part of a recipe that are not the defaults, in words."""
    usual = defaults(type(part)).items()
    values = {key: getattr(part, key) for key, value in usual if getattr(part, key) != value}
    return [f"{section}.{key} {value}" for key, value in values.items()]


def _may_differ() -> set[str]:
    """Settings that change no loss; the text behind paths is compared by its fingerprint."""
    return {name for name, facts in setting_facts().items() if facts.of_rank or facts.equal == ""}


def _differing(
    settings: Collection[Mapping[str, Any]], beginnings: tuple[str, ...], without: set[str]
) -> list[str]:
    """Names of settings that begin so and differ between runs."""
    names = dict.fromkeys(name for named in settings for name in named)
    return [
        name
        for name in names
        if name.startswith(beginnings)
        and name not in without
        and len({str(named.get(name)) for named in settings}) > 1
    ]


def _points(run: str, recipe: Recipe, records: Sequence[Record]) -> list[LossPoint]:
    """A run's losses that count."""
    schedule, batches = recipe.learning_rate, Counter[float]()
    end = records[-1]["tokens"]
    start = max(FIRST_PART * end, schedule.warmup_fraction * schedule.total_tokens)
    points: list[LossPoint] = []
    before, alike = 0, {record["round"] for record in of_newest_text(records)}
    for record in records:
        tokens, loss = record["tokens"], record.get("val_loss")
        sizes = [trainer["trainer_batch"] for trainer in record["trainers"]]
        for size in sizes:
            batches[size] += (tokens - before) * size / sum(sizes)
        before = tokens
        annealed = schedule.shape != "constant" and tokens >= schedule.total_tokens
        if loss is None or record["round"] not in alike or tokens < start:
            continue
        if not (annealed or schedule.decay(tokens) == 1):
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
