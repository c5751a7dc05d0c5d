"""The files of a run folder that grow with it: metrics.jsonl (a line per round), steps.jsonl (a line per inner step of each worker) and
out_of_memory.jsonl (a line where memory ran out in a step that could not be repeated).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adloco.algorithms.reports import RoundReport
from adloco.run.memory_use import Usage

METRICS, STEPS, OUT_OF_MEMORY = "metrics.jsonl", "steps.jsonl", "out_of_memory.jsonl"
Record = dict[str, Any]
"""One line of metrics.jsonl; docs/run-folder.md lists its fields."""


def round_record(
    report: RoundReport,
    *,
    tokens_per_sample: int,
    seconds: float,
    tokens_per_second: float,
    memory_bytes: int,
    memory: Usage,
    measured: dict[int, dict[str, float]],
) -> Record:
    """One line of metrics.jsonl. measured: what the evaluation measured, by trainer; empty where this round was not evaluated."""
    tokens = report.samples * tokens_per_sample
    best = min(measured.values(), key=lambda values: values["loss"], default={})
    trainer_fields = [
        "trainer", "workers", "requested_batch", "worker_batch", "micro_batch", "accumulation_steps", "trainer_batch", "rounded_up",
        "grad_variance", "grad_norm_sq", "noise_scale", "train_loss", "learning_rate", "cosine_similarity", "wire_error",
    ]  # fmt: skip
    return {
        "round": report.round,
        "tokens": tokens,
        "samples": report.samples,
        "inner_steps": report.inner_steps,
        "syncs": report.syncs,
        "bytes_communicated": report.bytes_communicated,
        "bytes_sent": report.bytes_sent,
        "bytes_inside": report.bytes_inside,
        "bytes_ddp_equivalent": report.bytes_ddp_equivalent,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens_per_second, 1),
        "train_loss": report.train_loss,
        "pass_limit": report.pass_limit,
        "val_loss": best.get("loss"),
        "val_perplexity": math.exp(min(best["loss"], 700.0)) if best and "accuracy" not in best else None,
        "val_accuracy": best.get("accuracy"),
        "learning_rate": report.trainers[0].learning_rate,
        "memory_bytes": memory_bytes,
        "memory": memory,
        "sync": asdict(report.sync),
        "trainers": [
            {name: getattr(trainer, name) for name in trainer_fields}
            | {f"val_{measure}": measured.get(trainer.trainer, {}).get(measure) for measure in ("loss", "accuracy")}
            for trainer in report.trainers
        ],
        "workers": [asdict(worker) for worker in report.workers],
        "merges": [
            {"survivor": merge.survivor, "absorbed": list(merge.absorbed), "weights": {str(key): weight for key, weight in merge.weights.items()}}
            for merge in report.merges
        ],
    }


def summarise(records: Sequence[Record], *, num_parameters: int, recipe: str) -> dict[str, Any]:
    """Contents of summary.json."""
    last = records[-1]
    losses = [record["val_loss"] for record in records if record["val_loss"] is not None]
    accuracies = [record["val_accuracy"] for record in records if record["val_accuracy"] is not None]
    syncs = sync_totals(records)
    return {
        "final_val_loss": losses[-1] if losses else None,
        "best_val_loss": min(losses, default=None),
        "final_val_accuracy": accuracies[-1] if accuracies else None,
        "tokens": last["tokens"],
        "syncs": last["syncs"],
        "bytes": last["bytes_communicated"],
        "bytes_sent": last["bytes_sent"],
        "bytes_inside": last["bytes_inside"],
        "compression_ratio": syncs.compression_ratio,
        "cosine_similarity": syncs.cosine_similarity,
        "wire_error": syncs.wire_error,
        "exposed_seconds": syncs.exposed_seconds,
        "hidden_seconds": syncs.hidden_seconds,
        "peak_bytes_per_second": syncs.peak_bytes_per_second,
        "seconds": last["seconds"],
        "rounds": last["round"],
        "num_parameters": num_parameters,
        "recipe": recipe,
    }


@dataclass(frozen=True, kw_only=True)
class SyncTotals:
    """The syncs of a run: those of its rounds, not what brings workers together before a merge and at the end. None: there were none."""

    bytes_per_round: float | None
    """Handed over by a worker, mean over the rounds in which any was."""
    compression_ratio: float | None
    """Of all rounds together."""
    exposed_seconds: float
    hidden_seconds: float
    peak_bytes_per_second: float | None
    """Of the round with the most; None where workers share one island."""
    cosine_similarity: float | None
    """Of the last round that has one, mean over trainers."""
    wire_error: float | None
    """Likewise."""


def sync_totals(records: Sequence[Record]) -> SyncTotals:
    """What metrics.jsonl says about syncs, over all its rounds."""
    syncs = [record["sync"] for record in records]
    sizes = [(sync["bytes"], sync["compression_ratio"]) for sync in syncs if sync["bytes"]]
    total = sum(size for size, _ in sizes)
    return SyncTotals(
        bytes_per_round=total / len(sizes) if sizes else None,
        compression_ratio=sum(size * ratio for size, ratio in sizes) / total if sizes else None,
        exposed_seconds=sum(sync["exposed_seconds"] for sync in syncs),
        hidden_seconds=sum(sync["hidden_seconds"] for sync in syncs),
        peak_bytes_per_second=max((sync["peak_bytes_per_second"] for sync in syncs if sync["peak_bytes_per_second"] is not None), default=None),
        cosine_similarity=_last_mean(records, "cosine_similarity"),
        wire_error=_last_mean(records, "wire_error"),
    )


class Records:
    """Appends to these files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, record: Record, report: RoundReport) -> None:
        # Steps first: a metrics line says that its round is complete.
        _append(self.folder / STEPS, [{"round": report.round, **asdict(step)} for step in report.steps])
        _append(self.folder / METRICS, [record])

    def read(self) -> list[Record]:
        """All lines of metrics.jsonl."""
        return list(_lines(self.folder / METRICS))

    def add_out_of_memory(self, rounds: int, message: str, pass_limit: int) -> None:
        """By whichever rank it was, for whoever goes on with the run: a line is appended at once, so that ranks do not disturb one another."""
        _append(self.folder / OUT_OF_MEMORY, [{"rounds_done": rounds, "message": message, "pass_limit": pass_limit}])

    def pass_limit(self) -> int:
        """The largest micro-batch that is left to try since memory ran out; 0 if it never did where a step could not be repeated."""
        return min((line["pass_limit"] for line in _lines(self.folder / OUT_OF_MEMORY)), default=0)

    def cut(self, rounds: int) -> None:
        """Forget what was recorded after this many rounds: a resumed run writes it again."""
        for name in (METRICS, STEPS):
            kept = [line for line in _lines(self.folder / name) if line["round"] <= rounds]
            temporary = self.folder / f".{name}"
            temporary.unlink(missing_ok=True)
            _append(temporary, kept)
            temporary.replace(self.folder / name)


def write_json(file: Path, value: Any) -> None:
    """A JSON file for people and programs: indented, without NaN or Infinity, replaced as a whole."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")
    temporary.replace(file)


def finite(value: Any) -> Any:
    """The value with null for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _last_mean(records: Sequence[Record], key: str) -> float | None:
    """Of the last round in which any trainer has a value, the mean over those that do."""
    rounds: list[list[float]] = [[row[key] for row in record["trainers"] if row[key] is not None] for record in records]
    found = next((values for values in reversed(rounds) if values), [])
    return sum(found) / len(found) if found else None


def _append(file: Path, lines: Sequence[Record]) -> None:
    with file.open("a") as out:
        out.write("".join(json.dumps(finite(line), allow_nan=False) + "\n" for line in lines))


def _lines(file: Path) -> Iterator[Record]:
    if not file.exists():
        return
    # A process killed while writing leaves a last line without its end.
    for line in file.read_text().split("\n")[:-1]:
        yield json.loads(line)
