"""Copies of a run's state in the memory of two islands."""

from pathlib import Path
from typing import Any

import torch

from adloco import place
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.testing import run_on_ranks
from adloco.run.memory_copies import MemoryCopies
from adloco.run.recovery import load_newest_good
from tests.run.test_recovery import save

NUMBERS = {"trainers": [{"trainer": 0, "workers": [0, 1, 2]}]}
PARTS = ("run", "trainer-0", "worker-0", "worker-1", "worker-2")


def parts_of(rank: int, number: int) -> dict[str, Any]:
    """What a rank with one worker has to save after a round."""
    names = [*(PARTS[:2] if rank == 0 else ()), f"worker-{rank}"]
    about = {"algorithm": NUMBERS, "round": number}
    return {name: {**about, "tensor": torch.full((3,), float(number))} for name in names}


def kept_and_found(folder: Path, lost: int) -> tuple[list[str], int, str, list[float], str]:
    """Copies after three rounds; then what is found without those of a rank."""
    placement = place(3)
    copies = MemoryCopies(placement, 2)
    sent = 0
    for number in range(4, 7):
        assert copies.due(number) is (number % 2 == 0)
        sent = copies.keep(f"round-{number}", parts_of(placement.rank, number))
    assert sorted(copies.copies) == ["round-5", "round-6"]
    kept = sorted(copies.copies["round-6"])
    here = {} if placement.rank == lost else copies.copies
    found = load_newest_good(folder, placement, here)
    for state in found.parts.values():
        state["tensor"] += 1  # As training does.
    again = load_newest_good(folder, placement, here)
    numbers = [float(state["tensor"][0]) for state in again.parts.values()]
    return kept, sent, found.checkpoint.name, numbers, found.newest_on_disk


def test_the_others_have_all_parts_of_a_lost_island(tmp_path: Path) -> None:
    save(tmp_path, 1)
    zero, one, two = run_on_ranks(kept_and_found, 3, tmp_path, 0)
    assert zero[0] == ["run", "trainer-0", "worker-0", "worker-2"], "its own, and of the one before"
    assert one[0] == ["run", "trainer-0", "worker-0", "worker-1"]
    assert two[0] == ["worker-1", "worker-2"]
    for _, sent, name, numbers, on_disk in (zero, one, two):
        assert sent == len(PARTS) * 3 * 4
        assert (name, on_disk) == ("round-6", "round-1")
        assert numbers == [6.0] * 3, "run, trainer-0 and its worker; as they were kept"


def test_one_island_makes_no_copies() -> None:
    assert not MemoryCopies(OneProcess(), 1).due(1)
