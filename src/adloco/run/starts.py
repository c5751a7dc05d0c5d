"""Starts of a run and what was lost before each: starts.jsonl, a line each time that training
begins, resumes or is stopped.

The run's clock counts the seconds of training that are kept (`seconds` in metrics.jsonl). What a
failure costs is the time since the line before, less what the clock has counted since then, so that
no process has to say when it died.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from adloco.errors import RunWarning
from adloco.metrics import Record
from adloco.run.json_files import read_objects, text_of
from adloco.run.record_types import Count, Number
from adloco.whole_file import write_text

STARTS = "starts.jsonl"
Seconds = Annotated[Number, Field(ge=0, lt=2**36)]
"""The calendar of Python ends later than 2^36 seconds after 1970."""
Kind = Literal["begin", "resume", "regroup", "join", "stop", "rewind"]
"""Kind of event.

begin: the run began.
resume: a new process resumes from a checkpoint.
regroup: the ranks that remain after a failure resume in place from a checkpoint.
join: ranks came back, and the others lost nothing by it.
stop: training ended with a checkpoint, because it was told to or its budget was spent.
rewind: somebody took the run back to a checkpoint, so what came after it is not lost but given up.
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Progress of a run at an event."""

    round: int
    """Complete rounds."""
    tokens: int
    """Tokens that were trained on, those of a round in progress included."""
    seconds: float
    """The run's clock."""

    @classmethod
    def of(cls, record: Record) -> "Point":
        """The point that a line of metrics.jsonl records; zeros if it is empty."""
        return cls(**{field.name: record.get(field.name, 0) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Start:
    """A line of starts.jsonl."""

    kind: Kind
    time: Seconds
    """Seconds since 1970."""
    round: Count
    tokens: Count
    seconds: Seconds
    """These three are the point from which training continues, see `Point`."""
    failed: bool = False
    """True if training had ended before it without `stop`, and no rewind says so already."""
    tokens_repeated: Count = 0
    """Tokens of complete rounds that are trained again."""
    seconds_repeated: Seconds = 0.0
    """Seconds that training them took."""
    seconds_down: Seconds = 0.0
    """Seconds without training that is kept or repeated, whatever the reason: a pause, or the round
    in which a process died, and the time until training continued.
    """

    @property
    def interrupted(self) -> bool:
        """True if something was lost before this start."""
        return self.failed or self.tokens_repeated > 0

    @property
    def seconds_lost(self) -> float:
        """Seconds that a failure cost; a pause is not lost."""
        return self.seconds_repeated + (self.seconds_down if self.failed else 0.0)


class Starts:
    """Records when training starts and stops; only the process that writes knows the lines."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        """writes: True if this process writes files; in all others nothing happens."""
        self.writes = writes
        self.lines: list[Start] = []
        """All starts and stops of the run."""
        self._folder = folder
        self._training = False
        self._resumed: tuple[Point, Point, int] | None = None
        self._kind: Kind = "resume"

    def resume(
        self, at: Point, newest: Record, kind: Kind = "resume", dropped_tokens: int = 0
    ) -> None:
        """Read what was recorded, before records are cut; `begin` records the start.

        Args:
            at: The checkpoint from which training continues.
            newest: The newest line of metrics.jsonl; empty without one.
            kind: What `begin` records.
            dropped_tokens: As in `start_after`.

        Raises:
            ValueError: A line is damaged.
        """
        self._kind = kind
        self.lines = read_starts(self._folder)
        self._resumed = at, Point.of(newest), dropped_tokens

    def begin(self, here: Point) -> None:
        """Record that training begins or continues, unless this process is training already."""
        if not self._training:
            at, reached, dropped = self._resumed or (here, here, 0)
            self.add(self._kind if self._resumed or self.lines else "begin", at, reached, dropped)
            self._training, self._resumed = True, None

    def stop(self, here: Point) -> None:
        """Record that training ends, with a checkpoint from which it can continue."""
        self.add("stop", here, here)
        self._training = False

    def add(self, kind: Kind, at: Point, reached: Point, dropped_tokens: int = 0) -> None:
        """Append a line of this moment; without room for it, warn and continue.

        Args:
            at: Where training continues. The run's clock must continue from `at.seconds`.
            reached: How far the run had come before, with what is trained again from `at` on.
            dropped_tokens: As in `start_after`.

        Raises:
            ValueError: A line of the file is damaged.
        """
        if not self.writes:
            return
        before = read_starts(self._folder)
        start = start_after(before, kind, at, reached, time.time(), dropped_tokens)
        self.lines = [*before, start]
        file = self._folder / STARTS
        try:
            write_text(file, text_of(map(asdict, self.lines)))
        except OSError as error:
            warnings.warn(
                f"{file} cannot be written ({error.strerror or error}); the run continues, and the "
                "file lacks a line",
                RunWarning,
                stacklevel=2,
            )


def failure_cost(starts: Sequence[Start], seconds: float) -> dict[str, Any]:
    """Work that a run has repeated and lost at its interruptions, by the names in summary.json.

    `goodput` is the part of the time, without pauses, that was training which counts: from 0 to 1.

    seconds: The run's clock.
    """
    lost = sum(start.seconds_lost for start in starts)
    return {
        "interruptions": sum(start.interrupted for start in starts),
        "tokens_repeated": sum(start.tokens_repeated for start in starts),
        "seconds_lost": lost,
        "goodput": seconds / (seconds + lost) if lost else 1.0,
    }


def read_starts(folder: Path) -> list[Start]:
    """The starts and stops of the run in a folder; ValueError if a line is damaged."""
    return read_objects(folder / STARTS, Start)


def start_after(
    before: Sequence[Start],
    kind: Kind,
    at: Point,
    reached: Point,
    now: float,
    dropped_tokens: int = 0,
) -> Start:
    """A start or stop, with what was lost since the line before it.

    Args:
        at, reached: As in `Starts.add`.
        now: Seconds since 1970.
        dropped_tokens: Tokens of the round in progress at `at`, by workers that are dropped now.
            They do not count any more, but are not trained again.
    """
    here = Start(kind=kind, time=round(now, 3), **asdict(at))
    if kind not in ("resume", "regroup", "rewind"):
        return here
    last = before[-1] if before else None
    # A stop within a round has come further than the newest record.
    tokens, clock = max((point.tokens, point.seconds) for point in (reached, last or reached))
    saved = at.tokens + dropped_tokens
    if tokens <= saved:
        tokens, clock = saved, at.seconds
    again = kind != "rewind"  # What a rewind gives up is not lost.
    # Without room for a line none was written, which would tell a stop from a failure.
    failed = last.kind not in ("stop", "rewind") if last else again and tokens > saved
    ended = now if last is None else last.time + (clock - last.seconds) * failed
    return replace(
        here,
        failed=failed,
        tokens_repeated=again * (tokens - saved),
        seconds_repeated=round(again * max(0.0, clock - at.seconds), 3),
        seconds_down=round(max(0.0, now - ended), 3),  # Clocks of machines may differ.
    )
