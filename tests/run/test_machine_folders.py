"""The records of a run whose rank 0 moves between machines, each with a folder of its own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adloco import place
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.testing import run_on_ranks
from adloco.run.machine_folders import fetch_records
from adloco.run.records import METRICS, STEPS, Records


def lines(rounds: Sequence[int], machine: str) -> str:
    return "".join(json.dumps({"round": number, "by": machine}) + "\n" for number in rounds)


def write(folder: Path, rounds: Sequence[int], machine: str) -> Records:
    """Records of these rounds, as a resumed run has them."""
    folder.mkdir(exist_ok=True)
    for name in (METRICS, STEPS):
        (folder / name).write_text(lines(rounds, machine))
    records = Records(folder)
    records.cut(max(rounds, default=0))
    return records


def fetched(folders: list[Path], digests: dict[str, list[Any]], rounds: int) -> list[list[str]]:
    """Who wrote the lines of each round that rank 0 has then, by file."""
    records = Records(folders[this_rank()])
    fetch_records(records, digests, rounds, place(len(folders)))
    if this_rank() > 0:
        return []
    records.check_unchanged(digests, rounds)
    files = [(folders[0] / name).read_text().splitlines() for name in (METRICS, STEPS)]
    return [[f"{line['round']}{line['by']}" for line in map(json.loads, file)] for file in files]


@pytest.mark.parametrize(
    ("of_zero", "of_one", "writer", "expected"),
    [
        # Rank 0 was on the other machine for rounds 3 and 4, and has come back.
        ([1, 2, 5], [3, 4], 0, "1a 2a 3b 4b 5a"),
        ([1, 2], [3, 4], 1, "1a 2a 3b 4b"),
        # Round 3 was written here, failed, and was trained again there.
        ([1, 2, 3], [3, 4], 1, "1a 2a 3b 4b"),
        ([1, 2, 3], [3], 1, "1a 2a 3b"),
        ([], [1, 2], 1, "1b 2b"),
        ([1, 2], [], 0, "1a 2a"),
    ],
)
def test_rank_0_has_the_lines_that_it_wrote_on_another_machine(
    of_zero: list[int], of_one: list[int], writer: int, expected: str, tmp_path: Path
) -> None:
    """The checkpoint was made by the writer, whose lines count."""
    folders = [tmp_path / "zero", tmp_path / "one"]
    both = [write(folders[0], of_zero, "a"), write(folders[1], of_one, "b")]
    digests = both[writer].digests()
    rounds = max([*of_zero, *of_one])
    found = run_on_ranks(fetched, 2, folders, digests, rounds)[0]
    assert found == [expected.split()] * 2
    # Killed before its next checkpoint, it begins from the same one.
    assert run_on_ranks(fetched, 2, folders, digests, rounds)[0] == found


def test_a_changed_line_is_not_taken_for_one_that_came_back(tmp_path: Path) -> None:
    records = write(tmp_path / "run", [1, 4], "a")
    digests = records.digests()
    assert digests[METRICS][2:] == [2, 3]
    file = tmp_path / "run" / METRICS
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join([whole[0], lines([2, 3], "b"), whole[1]]))
    records.check_unchanged(digests, 4)
    file.write_text(file.read_text().replace('{"round": 1, "by": "a"}', '{"round": 1, "by": "x"}'))
    with pytest.raises(ValueError, match="is not what the run wrote"):
        records.check_unchanged(digests, 4)
