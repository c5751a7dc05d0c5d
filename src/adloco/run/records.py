"""The files to which a run appends: metrics.jsonl (a line per round) and steps.jsonl (a line per
inner step of each worker).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adloco.algorithms.reports import RoundReport
from adloco.discovery import lab_modules
from adloco.metrics import Record
from adloco.run.json_files import RoundLines
from adloco.run.record_types import StepLine, metrics_line
from adloco.whole_file import remedy, to_disk

METRICS, STEPS = "metrics.jsonl", "steps.jsonl"


class Records:
    """Appends to these files in a run folder, and reads them."""

    def __init__(self, folder: Path, resume: str = "") -> None:
        """resume: The command or call that resumes the run; empty to read alone."""
        self.folder = folder
        self._resume = resume
        self._metrics = RoundLines(folder / METRICS, rise=1)
        self._files = {METRICS: self._metrics, STEPS: RoundLines(folder / STEPS, rise=0)}

    def add(self, record: Record, report: RoundReport) -> None:
        """Append a round's line of metrics.jsonl and its inner steps."""
        with self._needed():
            # Steps first: a metrics line says that its round is complete.
            self._files[STEPS].add({"round": report.round, **asdict(step)} for step in report.steps)
            self._metrics.add([record])

    def read(self) -> list[Record]:
        """All lines of metrics.jsonl."""
        return list(self._metrics.read())

    def read_whole(self) -> list[Record]:
        """All lines of metrics.jsonl; ValueError if a number is missing in one of them."""
        return list(self._metrics.read(metrics_line()))

    def steps(self) -> Iterator[Record]:
        """The lines of steps.jsonl, one after another; ValueError at one that is damaged."""
        return self._files[STEPS].read(StepLine)

    def check(self) -> None:
        """Raise ValueError if a line is damaged or out of order, or a number is missing in it."""
        for lines in (self._metrics.read(metrics_line()), self.steps()):
            for _ in lines:
                pass

    def digests(self) -> dict[str, list[Any]]:
        """Digests of all files (`RoundLines.digest`), for a checkpoint."""
        return {name: lines.digest() for name, lines in self._files.items()}

    def unchanged(self, digests: Mapping[str, Sequence[Any]]) -> bool:
        """True if all files begin with what the run had written at a checkpoint."""
        return all(self._files[name].unchanged(digest) for name, digest in digests.items())

    def check_unchanged(self, digests: Mapping[str, Sequence[Any]], rounds: int) -> None:
        """Raise ValueError if a file has other lines than at a checkpoint; see `RoundLines`."""
        for name, digest in digests.items():
            self._files[name].check_unchanged(digest, rounds)

    def gone(self, rounds: int) -> dict[str, list[int]]:
        """For each file, the rounds up to this one that have no line."""
        return {name: lines.gone(rounds) for name, lines in self._files.items()}

    def of_rounds(self, rounds: Mapping[str, Sequence[int]]) -> dict[str, list[Record]]:
        """For each file, the lines of these rounds."""
        return {name: self._files[name].of_rounds(numbers) for name, numbers in rounds.items()}

    def insert(self, lines: Mapping[str, Sequence[Record]]) -> None:
        """Put lines into the files, instead of others of the same rounds."""
        with self._needed():
            for name, found in lines.items():
                self._files[name].insert(found)

    def newest(self) -> Record:
        """The newest line of metrics.jsonl; empty if there is none."""
        return self._metrics.newest()

    def to_disk(self) -> None:
        """Wait until all lines are on disk. A checkpoint counts only after that."""
        with self._needed():
            for lines in self._files.values():
                if lines.file.exists():
                    to_disk(lines.file)
            to_disk(self.folder)

    @contextmanager
    def _needed(self) -> Iterator[None]:
        """Raise ValueError for an OSError: without its records a run does not continue."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"the records of the run cannot be written in {self.folder} "
                f"({error.strerror or error}); {remedy(error)}, then resume with: "
                f"{self._resume}"
            ) from error

    def cut(self, rounds: int) -> list[str]:
        """Remove the lines of all rounds after this many, which a resumed run writes again, and
        what options have recorded of them; return a sentence for each file that has no line of some
        earlier round.
        """
        for option in lab_modules("records"):
            option.cut(self.folder, rounds)
        return self._told({name: lines.cut(rounds) for name, lines in self._files.items()}, rounds)

    def lost(self, rounds: int) -> list[str]:
        """A sentence for each file that has no line of some round up to this one."""
        return self._told(self.gone(rounds), rounds)

    def _told(self, gone: Mapping[str, Sequence[int]], rounds: int) -> list[str]:
        return [
            f"{self.folder / name} has lost the lines of {len(numbers)} of the {rounds} rounds up "
            "to the checkpoint; the report leaves them out"
            for name, numbers in gone.items()
            if numbers
        ]
