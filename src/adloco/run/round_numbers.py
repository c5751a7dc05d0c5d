"""The numbers of a round as a line of metrics.jsonl, and those of a whole run as summary.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from adloco.algorithms.evaluation import Sums, means, total
from adloco.algorithms.reports import RoundReport, WorkerReport
from adloco.config.sections import Recipe
from adloco.metrics import (
    ROUND,
    SYNC,
    TRAINER,
    WORKER,
    Metric,
    Record,
    aggregate,
    validation,
    values,
)
from adloco.options import option_metrics, unmeasured
from adloco.rules.outcome import ended_finite, of_newest_text
from adloco.run.memory_use import Memory
from adloco.run.run_progress import Progress

SUMMARY = {
    "tokens": ROUND["tokens"],
    "syncs": ROUND["syncs"],
    "bytes": ROUND["bytes_communicated"],
    "bytes_sent": ROUND["bytes_sent"],
    "bytes_inside": ROUND["bytes_inside"],
    "compression_ratio": SYNC["compression_ratio"],
    "cosine_similarity": TRAINER["cosine_similarity"],
    "wire_error": TRAINER["wire_error"],
    "exposed_seconds": SYNC["exposed_seconds"],
    "hidden_seconds": SYNC["hidden_seconds"],
    "peak_bytes_per_second": SYNC["peak_bytes_per_second"],
    "seconds": ROUND["seconds"],
    "rounds": ROUND["round"],
    "skipped_steps": WORKER["skipped_steps"],
    "restarts": WORKER["restarts"],
    **{name: WORKER[name] for name, each in option_metrics().items() if each.aggregation == "sum"},
}
"""Keys of summary.json, and the metrics they sum up."""


def round_record(
    report: RoundReport,
    recipe: Recipe,
    progress: Progress,
    *,
    tokens_per_second: float,
    mfu: float | None,
    bytes_checkpoint: int,
    memory: Memory,
    measured: Mapping[int, Mapping[int, Sums]],
) -> Record:
    """One line of metrics.jsonl.

    Args:
        progress: Of the run after the round and its evaluation.
        tokens_per_second: In this round's training alone.
        mfu: The share of the devices' arithmetic that this is; None if it is not known.
        bytes_checkpoint: Bytes of checkpoints that crossed between islands so far.
        memory: Of this process, since the last record by phase.
        measured: Sums of the task's measures, by trainer and island; empty if the round was not
            evaluated.
    """
    measures, names = recipe.task.measures, [*recipe.data.islands]
    of_trainers = {
        trainer: recipe.task.measured(means(total([*sums.values()])))
        for trainer, sums in measured.items()
    }
    # One that is not finite is worse than any other; min would keep a nan that comes first.
    best = min(
        of_trainers.values(),
        key=lambda found: found["loss"] if math.isfinite(found["loss"]) else math.inf,
        default={},
    )
    known = {
        "tokens": report.samples * recipe.data.context_tokens,
        "seconds": round(progress.seconds, 3),
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "rows_read": progress.rows,
        "learning_rate": report.trainers[0].learning_rate,
        "bytes_checkpoint": bytes_checkpoint,
        "memory_bytes": memory.peak_bytes,
    }

    def evaluated(found: Mapping[str, float]) -> dict[str, float | None]:
        # A task of one's own may give numbers of NumPy or torch.
        numbers = {name: float(number) for name, number in found.items()}
        return {validation(measure).name: numbers.get(measure.name) for measure in measures}

    return {
        **{name: known[name] if name in known else getattr(report, name) for name in ROUND},
        **evaluated(best),
        "memory": memory.take(),  # It begins the next record: peak_bytes was read before.
        "sync": asdict(report.sync),
        "trainers": [
            asdict(trainer) | evaluated(of_trainers.get(trainer.trainer, {}))
            for trainer in report.trainers
        ],
        # There is one trainer where islands have texts of their own.
        "islands": [
            {"island": names[island]} | evaluated(recipe.task.measured(means(sums)))
            for by_island in (measured.values() if names else ())
            for island, sums in by_island.items()
        ],
        "workers": [_flat(worker) for worker in report.workers],
        "merges": [
            {
                "survivor": merge.survivor,
                "absorbed": list(merge.absorbed),
                "weights": {str(key): weight for key, weight in merge.weights.items()},
            }
            for merge in report.merges
        ],
        "changes": [asdict(change) for change in report.changes],
    }


def _flat(report: WorkerReport) -> dict[str, Any]:
    """A report with what stages say of it, and what options say where they have no stage."""
    numbers = asdict(report)
    more: dict[str, Any] = numbers.pop("more")
    return numbers | unmeasured() | more


def summarise(
    records: Sequence[Record],
    measures: Sequence[Metric],
    *,
    num_parameters: int,
    recipe: str,
    trainer: int | None = None,
) -> dict[str, Any]:
    """Contents of summary.json.

    Args:
        num_parameters: Of the model, as far as they are trained.
        trainer: Whose measures to take; None for those of the best trainer in each round.
    """
    summary: dict[str, Any] = {}
    alike = of_newest_text(records)
    finite = ended_finite(records)
    for measure in measures:
        metric = validation(measure, "round" if trainer is None else "trainer")
        every = [number for numbers in values(metric, alike, trainer) for number in numbers]
        summary[f"final_{metric.name}"] = every[-1] if every and finite else None
        summary[f"best_{metric.name}"] = (min if measure.better == "lower" else max)(
            every, default=None
        )
    summary |= {key: aggregate(metric, records) for key, metric in SUMMARY.items()}
    return summary | {"num_parameters": num_parameters, "recipe": recipe}
