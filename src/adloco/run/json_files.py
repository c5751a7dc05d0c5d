"""JSON files of a run: whole objects, and files to which a run appends a line at a time."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from adloco.config.values import adapter
from adloco.errors import require
from adloco.metrics import Record
from adloco.run.record_types import OfRound, fault
from adloco.whole_file import write_bytes, write_text

T = TypeVar("T")


def write_json(file: Path, value: Any) -> None:
    """Write an indented JSON file atomically, with null for nan and infinity."""
    write_text(file, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is damaged, or a pipe."""
    _there(file)
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


def text_of(lines: Iterable[Record]) -> str:
    """The text of lines of JSON."""
    return "".join(json.dumps(finite(line), allow_nan=False) + "\n" for line in lines)


def read_lines(file: Path, kind: type = OfRound) -> Iterator[Record]:
    """The complete lines of a file, one after another; none if there is no file, ValueError at a
    line that is damaged.

    kind: A type from `record_types`, which says what a line must have.
    """
    if not _there(file):
        return
    # A process that was killed while writing leaves an incomplete last line.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _parse(line, file, f"line {number}", kind)


def read_objects(file: Path, kind: type[T]) -> list[T]:
    """The lines of a file as values of a dataclass; ValueError if one is damaged."""
    make = adapter(kind).validate_python  # type: ignore[arg-type]
    return [make(line) for line in read_lines(file, kind)]


def _there(file: Path) -> bool:
    """True if there is such a file; ValueError if it is a pipe, which would be waited for."""
    there = file.exists()
    require(not there or file.is_file(), f"{file} is not a file; restore it from a copy")
    return there


def _parse(line: bytes, file: Path, where: str, kind: type) -> Record:
    try:
        record: Record = json.loads(line.decode("utf-8"))
        found = fault(record, kind)
    except (ValueError, RecursionError):
        found = "no JSON"
    require(not found, f"{where} of {file} is damaged ({found}); restore the file from a copy")
    return record


class RoundLines:
    """A file of lines that a run appends, each of a round; the rounds rise.

    rise: How much the round rises at least from line to line.
    """

    def __init__(self, file: Path, *, rise: int) -> None:
        self.file = file
        self._rise = rise
        self._size, self._hash = 0, hashlib.sha256()
        self._gone: list[int] = []

    def add(self, lines: Iterable[Record]) -> None:
        """Append lines."""
        content = text_of(lines).encode()
        with self.file.open("ab") as out:
            out.write(content)
        self._size += len(content)
        self._hash.update(content)

    def read(self, kind: type = OfRound) -> Iterator[Record]:
        """The lines, one after another; ValueError at one that is damaged or out of order."""
        before = 0
        for number, line in enumerate(read_lines(self.file, kind), start=1):
            require(
                line["round"] >= before + self._rise,
                f"line {number} of {self.file} is damaged (round {line['round']} behind round "
                f"{before}); restore the file from a copy",
            )
            before = line["round"]
            yield line

    def newest(self) -> Record:
        """The newest line; empty if there is none."""
        complete = self._written().split(b"\n")[:-1]
        return _parse(complete[-1], self.file, "the last line", OfRound) if complete else {}

    def cut(self, rounds: int) -> list[int]:
        """Remove the lines of all rounds after this many; return the earlier rounds without one."""
        kept = [line for line in read_lines(self.file) if line["round"] <= rounds]
        content = text_of(kept).encode()
        # A full disk has no room for a copy, which is rarely needed.
        if content != self._written():
            write_bytes(self.file, content)
        self._size, self._hash = len(content), hashlib.sha256(content)
        self._gone = _gone(kept, rounds)
        return self._gone

    def gone(self, rounds: int) -> list[int]:
        """The rounds up to this one that have no line."""
        return _gone(read_lines(self.file), rounds)

    def of_rounds(self, rounds: Collection[int]) -> list[Record]:
        """The lines of these rounds."""
        return [line for line in read_lines(self.file) if line["round"] in rounds]

    def insert(self, lines: Sequence[Record]) -> None:
        """Put lines into their places, instead of others of the same rounds."""
        if not lines:
            return
        rounds = {line["round"] for line in lines}
        kept = [line for line in read_lines(self.file) if line["round"] not in rounds]
        write_text(self.file, text_of(sorted([*kept, *lines], key=lambda line: line["round"])))

    def digest(self) -> list[Any]:
        """The size and the SHA-256 of what the run has written, and the rounds that it had lost
        when it was resumed, for a checkpoint.
        """
        return [self._size, self._hash.hexdigest(), *self._gone]

    def unchanged(self, digest: Sequence[Any]) -> bool:
        """True if the file begins with what the run had written when this was its digest."""
        size, expected, *gone = digest
        written = self._written(-1 if gone else size)
        if gone:  # They may have come back from another machine.
            written = b"".join(
                line
                for line in written.splitlines(keepends=True)
                if line.endswith(b"\n")
                and _parse(line, self.file, "a line", OfRound)["round"] not in gone
            )[:size]
        return bool(hashlib.sha256(written).hexdigest() == expected)

    def check_unchanged(self, digest: Sequence[Any], rounds: int) -> None:
        """Raise ValueError if the file has other lines than those that the run wrote.

        A file without the lines of some rounds is as good as none of them, and `cut` says so.

        digest: From `digest`, at a checkpoint after so many complete rounds.
        """
        require(
            self.unchanged(digest) or not {*self.gone(rounds)} <= {*digest[2:]},
            f"{self.file} is not what the run wrote: lines up to round {rounds} were changed "
            "since its checkpoint; restore it from a copy, or remove it to continue without",
        )

    def _written(self, size: int = -1) -> bytes:
        """The first bytes of the file, or all of them; none if there is no file."""
        if not _there(self.file):
            return b""
        with self.file.open("rb") as content:
            return content.read(size)


def _gone(lines: Iterable[Record], rounds: int) -> list[int]:
    """The rounds up to this one that have no line."""
    return sorted({*range(1, rounds + 1)} - {line["round"] for line in lines})
