"""The files to which a run appends: metrics.jsonl (a line per round), steps.jsonl (a line per inner
step of each worker) and out_of_memory.jsonl (a line each time memory ran out in a step that could
not be repeated); and the summary of a whole run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adloco.algorithms.reports import RoundReport, TrainerReport, WorkerReport
from adloco.errors import require
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
from adloco.run.record_check import memory_fault, record_fault, round_fault, step_fault
from adloco.whole_file import to_disk, write_text

if TYPE_CHECKING:
    from adloco.run.memory_use import Usage

METRICS, STEPS, OUT_OF_MEMORY = "metrics.jsonl", "steps.jsonl", "out_of_memory.jsonl"

TAIL_BYTES = 1 << 16
"""How much of metrics.jsonl is read at first to find its newest line."""

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
    **{
        name: metric
        for per in ("trainer", "worker")
        for name, metric in option_metrics(per).items()
        if metric.aggregation == "sum"
    },
}
"""Keys of summary.json, and the metrics they sum up."""


def round_record(
    report: RoundReport,
    measures: Sequence[Metric],
    *,
    tokens_per_sample: int,
    seconds: float,
    tokens_per_second: float,
    rows_read: int | None,
    rows_per_second: float | None,
    bytes_checkpoint: int,
    memory_bytes: int,
    memory: Usage,
    measured: Mapping[int, Mapping[str, float]],
) -> Record:
    """One line of metrics.jsonl.

    Args:
        report: What the algorithm reports of the round.
        measures: What the task measures in an evaluation.
        tokens_per_sample: Tokens of one sample.
        seconds: Since the start of the run.
        tokens_per_second: In this round's training alone.
        rows_read: Rows of a stream read so far; None without a stream.
        rows_per_second: Mean since this process began.
        bytes_checkpoint: Bytes of checkpoints that crossed between islands so far.
        memory_bytes: Peak of this process so far.
        memory: Memory by phase.
        measured: Each measure by name, by trainer; empty if the round was not evaluated.
    """
    best = min(measured.values(), key=lambda found: found["loss"], default={})
    known = {
        "tokens": report.samples * tokens_per_sample,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens_per_second, 1),
        "rows_read": rows_read,
        "rows_per_second": None if rows_per_second is None else round(rows_per_second, 1),
        "learning_rate": report.trainers[0].learning_rate,
        "bytes_checkpoint": bytes_checkpoint,
        "memory_bytes": memory_bytes,
    }

    def evaluated(found: Mapping[str, float]) -> dict[str, float | None]:
        return {validation(measure).name: found.get(measure.name) for measure in measures}

    return {
        **{name: known[name] if name in known else getattr(report, name) for name in ROUND},
        **evaluated(best),
        "memory": memory,
        "sync": asdict(report.sync),
        "trainers": [
            _flat(trainer, "trainer") | evaluated(measured.get(trainer.trainer, {}))
            for trainer in report.trainers
        ],
        "workers": [_flat(worker, "worker") for worker in report.workers],
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


def _flat(report: TrainerReport | WorkerReport, per: str) -> dict[str, Any]:
    """A report with what stages say of it, and what options say where they have no stage."""
    numbers = asdict(report)
    more: dict[str, Any] = numbers.pop("more")
    return numbers | unmeasured(per) | more


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
        records: The lines of metrics.jsonl.
        measures: What the task measures in an evaluation.
        num_parameters: Of the model.
        recipe: Name of the recipe.
        trainer: Whose measures to take; None for those of the best trainer in each round.
    """
    summary: dict[str, Any] = {}
    for measure in measures:
        metric = validation(measure, "round" if trainer is None else "trainer")
        every = [number for numbers in values(metric, records, trainer) for number in numbers]
        summary[f"final_{metric.name}"] = every[-1] if every else None
        summary[f"best_{metric.name}"] = (min if measure.better == "lower" else max)(
            every, default=None
        )
    summary |= {key: aggregate(metric, records) for key, metric in SUMMARY.items()}
    return summary | {"num_parameters": num_parameters, "recipe": recipe}


class Records:
    """Appends to these files in a run folder, and reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = {name: _Digest() for name in (METRICS, STEPS)}

    def add(self, record: Record, report: RoundReport) -> None:
        """Append a round's line of metrics.jsonl and its inner steps."""
        steps = [{"round": report.round, **asdict(step)} for step in report.steps]
        with self._needed():
            # Steps first: a metrics line says that its round is complete.
            for name, lines in ((STEPS, steps), (METRICS, [record])):
                self._written[name].add(_append(self.folder / name, lines))

    def read(self) -> list[Record]:
        """All lines of metrics.jsonl."""
        return list(self._metrics(round_fault))

    def read_whole(self) -> list[Record]:
        """All lines of metrics.jsonl; ValueError if a number is missing in one of them."""
        return list(self._metrics(record_fault))

    def steps(self) -> Iterator[Record]:
        """The lines of steps.jsonl, one after another; ValueError at one that is damaged."""
        file = self.folder / STEPS
        return _in_order(read_lines(file, step_fault), file, rise=0)

    def _metrics(self, fault: Callable[[Any], str]) -> Iterator[Record]:
        file = self.folder / METRICS
        return _in_order(read_lines(file, fault), file, rise=1)

    def check(self) -> None:
        """Raise ValueError if a line is damaged or out of order, or a number is missing in it."""
        for _ in self._metrics(record_fault):
            pass
        for _ in self.steps():
            pass

    def digests(self) -> dict[str, list[Any]]:
        """The size and the SHA-256 of what this run has written, by file; for a checkpoint."""
        return {name: [digest.size, digest.hex()] for name, digest in self._written.items()}

    def check_unchanged(self, digests: Mapping[str, Sequence[Any]], rounds: int) -> None:
        """Raise ValueError if a file has other lines than those that the run wrote.

        A file without the lines of some rounds is as good as none of them, and `cut` says so.

        Args:
            digests: From `digests`, at a checkpoint.
            rounds: Complete rounds at the checkpoint.
        """
        for name, (size, expected) in digests.items():
            file = self.folder / name
            if not file.exists() or _Digest.of(file, size).hex() == expected:
                continue
            require(
                bool(_gone(read_lines(file), rounds)),
                f"{file} is not what the run wrote: lines up to round {rounds} were changed since "
                "its checkpoint; restore it from a copy, or remove it to go on without",
            )

    def newest(self) -> Record:
        """The newest line of metrics.jsonl, read from the file's end; empty if there is none."""
        file = self.folder / METRICS
        if not file.exists():
            return {}
        with file.open("rb") as lines:
            size, read = lines.seek(0, os.SEEK_END), TAIL_BYTES
            while True:
                lines.seek(max(0, size - read))
                complete = lines.read().split(b"\n")[:-1]
                # The first piece may be the end of a line, unless it begins the file.
                if len(complete) > 1 or (complete and read >= size):
                    return _parse(complete[-1], file, "the last line", round_fault)
                if read >= size:
                    return {}
                read *= 4

    def add_out_of_memory(self, rounds: int, message: str, pass_limit: int) -> None:
        """Record that memory ran out, so that a resumed run trains with smaller micro-batches.

        Any rank may call it: each appends one line in one write.

        Args:
            rounds: Complete rounds so far.
            message: The error's message.
            pass_limit: The largest micro-batch to try next, in samples.
        """
        _append(
            self.folder / OUT_OF_MEMORY,
            [{"rounds_done": rounds, "message": message, "pass_limit": pass_limit}],
        )

    def pass_limit(self) -> int:
        """The smallest limit recorded by `add_out_of_memory`, in samples; 0 if there is none."""
        return min(
            (line["pass_limit"] for line in read_lines(self.folder / OUT_OF_MEMORY, memory_fault)),
            default=0,
        )

    def to_disk(self) -> None:
        """Wait until all lines are on disk. A checkpoint counts only after that."""
        with self._needed():
            for file in (self.folder / METRICS, self.folder / STEPS):
                if file.exists():
                    to_disk(file)
            to_disk(self.folder)

    @contextmanager
    def _needed(self) -> Iterator[None]:
        """Raise ValueError for an OSError: without its records a run does not go on."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"the records of the run cannot be written in {self.folder} "
                f"({error.strerror or error}); make room there, then go on with: adloco train "
                f"--resume {self.folder}"
            ) from error

    def cut(self, rounds: int) -> list[str]:
        """Remove the lines of all rounds after this many; a resumed run writes them again.

        Returns:
            A sentence for each file that has no line of some earlier round.
        """
        notices = []
        for name in (METRICS, STEPS):
            file = self.folder / name
            kept = [line for line in read_lines(file) if line["round"] <= rounds]
            # A full disk has no room for a copy, which is rarely needed.
            if _text(kept) != (file.read_text() if file.exists() else ""):
                write_text(file, _text(kept))
            self._written[name] = _Digest.of(file)
            gone = _gone(kept, rounds)
            if gone:
                notices.append(
                    f"{file} has lost the lines of {_rounds(gone)}; the run goes on from its "
                    f"checkpoint of round {rounds}, and its report leaves them out"
                )
        return notices


class _Digest:
    """The size and the SHA-256 of what is in a file so far."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    @staticmethod
    def of(file: Path, size: int = -1) -> _Digest:
        """Those of a file's first bytes, or of all of them; of none if there is no file."""
        found = _Digest()
        if file.exists():
            with file.open("rb") as content:
                found.add(content.read(size))
        return found

    def add(self, content: bytes) -> None:
        self.size += len(content)
        self._hash.update(content)

    def hex(self) -> str:
        return self._hash.hexdigest()


def write_json(file: Path, value: Any) -> None:
    """Write an indented JSON file atomically, with null for nan and infinity."""
    write_text(file, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is damaged."""
    try:
        content = json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError):
        content = None
    require(isinstance(content, dict), f"{file} is damaged (no JSON object); restore or remove it")
    return dict(content)


def finite(value: Any) -> Any:
    """The value with None for every nan and infinity in it, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_lines(file: Path, fault: Callable[[Any], str] = round_fault) -> Iterator[Record]:
    """The complete lines of a JSONL file, one after another; none if there is no file.

    Args:
        file: The file.
        fault: (line) -> what is wrong with it, or an empty text.

    Raises:
        ValueError: A line is damaged.
    """
    if not file.exists():
        return
    # A process that was killed while writing leaves an incomplete last line.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _parse(line, file, f"line {number}", fault)


def _in_order(lines: Iterable[Record], file: Path, *, rise: int) -> Iterator[Record]:
    """The lines, after a check that their rounds rise by at least so much from line to line."""
    before = 0
    for number, line in enumerate(lines, start=1):
        require(
            line["round"] >= before + rise,
            f"line {number} of {file} is damaged (round {line['round']} behind round {before}); "
            "restore the file from a copy",
        )
        before = line["round"]
        yield line


def _gone(lines: Iterable[Record], rounds: int) -> list[int]:
    """The rounds up to this one that have no line."""
    return sorted({*range(1, rounds + 1)} - {line["round"] for line in lines})


def _rounds(numbers: Sequence[int]) -> str:
    """Rounds in words: "rounds 2 to 4, 7"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    spans = [
        str(start) if start == end else f"{start} to {end}"
        for start, end in zip(starts, ends, strict=True)
    ]
    return f"{'round' if len(numbers) == 1 else 'rounds'} {', '.join(spans)}"


def _append(file: Path, lines: Sequence[Record]) -> bytes:
    """Append lines to a file; return what was written."""
    content = _text(lines).encode()
    with file.open("ab") as out:
        out.write(content)
    return content


def _text(lines: Sequence[Record]) -> str:
    return "".join(json.dumps(finite(line), allow_nan=False) + "\n" for line in lines)


def _parse(line: bytes, file: Path, where: str, fault: Callable[[Any], str]) -> Record:
    """The line; ValueError if it is damaged."""
    try:
        record: Record = json.loads(line.decode("utf-8"))
        found = fault(record)
    except (ValueError, RecursionError):
        found = "no JSON"
    require(not found, f"{where} of {file} is damaged ({found}); restore the file from a copy")
    return record
