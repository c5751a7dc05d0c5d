"""Micro-batches that did not fit on ranks that could not repeat the step. They are noted in the
run's folder, and the run resumes with smaller ones.
"""

import json
from pathlib import Path

from adloco.errors import OutOfMemoryError
from adloco.run.folder import resume_line
from adloco.run.json_files import read_lines
from adloco.run.record_types import MemoryLine

FILE = "out_of_memory.jsonl"


def noted(folder: Path, rounds: int, error: OutOfMemoryError) -> OutOfMemoryError:
    """Note an error of any rank, if smaller micro-batches are left; return it with what a user can
    do. Each rank appends one line in one write.

    rounds: Complete rounds so far.
    """
    # A rank on another machine may not see the folder.
    if error.smaller == 0 or not folder.is_dir():
        return error
    line = {"rounds_done": rounds, "message": str(error), "pass_limit": error.smaller}
    with (folder / FILE).open("a") as out:
        out.write(json.dumps(line) + "\n")
    return OutOfMemoryError(f"{error}, as {resume_line(folder)} does", error.smaller)


def limit(folder: Path) -> int:
    """The smallest micro-batch that was noted as left to try, in samples; 0 if none was."""
    return min((line["pass_limit"] for line in read_lines(folder / FILE, MemoryLine)), default=0)
