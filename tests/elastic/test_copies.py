"""Copies of a run's state in the memory of two islands."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco import place
from adloco.distributed.placement.placement import OneProcess
from adloco.distributed.testing import run_on_ranks
from adloco.elastic.copies import MemoryCopies, folder_owners, next_elsewhere
from adloco.run.checkpoint import list_all
from adloco.run.recovery import load_newest_good
from tests.run.test_recovery import save
from tests.run.test_training_run import make_run

NUMBERS = {"trainers": [{"trainer": 0, "workers": [0, 1, 2]}]}
PARTS = ("run", "trainer-0", "worker-0", "worker-1", "worker-2")


def parts_of(rank: int, number: int) -> dict[str, Any]:
    """What a rank with one worker has to save after a round."""
    names = [*(PARTS[:2] if rank == 0 else ()), f"worker-{rank}"]
    about = {"save": f"of round {number}", "algorithm": NUMBERS, "round": number}
    return {name: {**about, "tensor": torch.full((3,), float(number))} for name in names}


def kept_and_found(folder: Path, failed: int) -> tuple[list[str], str, list[float], str]:
    """Copies after three rounds; then what is found without those of a rank."""
    placement = place(3)
    copies = MemoryCopies()
    copies.place(folder, placement, 2)
    assert not copies.on_disk, "all see one folder"
    for number in range(4, 7):
        assert copies.due(number, saves=True, last=False) is (number % 2 == 0)
        assert not copies.due(number, saves=True, last=True)
        copies.keep(f"round-{number}", parts_of(placement.rank, number), placement)
    assert sorted(copies.parts) == ["round-5", "round-6"]
    # As ranks do that resume from round 6: until they have copied it again, they need these.
    copies.place(folder, placement, 2, "round-6")
    assert [*copies.parts] == ["round-6"]
    kept = sorted(copies.parts["round-6"])
    here = {} if placement.rank == failed else copies.parts
    found = load_newest_good(folder, placement, range(3), here)
    for state in found.parts.values():
        state["tensor"] += 1  # As training does.
    again = load_newest_good(folder, placement, range(3), here)
    numbers = [float(state["tensor"][0]) for state in again.parts.values()]
    return kept, found.checkpoint.name, numbers, found.newest_on_disk


def test_the_others_have_all_parts_of_a_failed_island(tmp_path: Path) -> None:
    save(tmp_path, 1)
    zero, one, two = run_on_ranks(kept_and_found, 3, tmp_path, 0)
    assert zero[0] == ["run", "trainer-0", "worker-0", "worker-2"], "its own, and of the one before"
    assert one[0] == ["run", "trainer-0", "worker-0", "worker-1"]
    assert two[0] == ["worker-1", "worker-2"]
    for _, name, numbers, on_disk in (zero, one, two):
        assert (name, on_disk) == ("round-6", "round-1")
        assert numbers == [6.0] * 3, "run, trainer-0 and its worker; as they were kept"


def found_beside_a_stale_disk(folders: list[Path]) -> tuple[str, list[str], list[str]]:
    """What a rank finds if the last of three has no copies, but round 4 of an earlier time."""
    placement = place(3)
    folder, copies = folders[placement.rank], MemoryCopies()
    copies.place(folder, placement, 1)
    copies.keep("round-4", parts_of(placement.rank, 40), placement)
    here = {} if placement.rank == 2 else copies.parts
    found = load_newest_good(folder, placement, range(3), here)
    saves = {state["save"] for state in found.parts.values()}
    return found.checkpoint.name, sorted(saves), [each.damage for each in found.unusable]


def test_a_machine_that_comes_back_takes_the_save_that_others_have_in_memory(
    tmp_path: Path,
) -> None:
    """Its disk has all parts of a round that the others have trained again since."""
    zero, two = (tmp_path / name for name in ("zero", "two"))
    for folder in (zero, two):
        save(folder, 3, PARTS)
    save(two, 4, PARTS)
    found = run_on_ranks(found_beside_a_stale_disk, 3, [zero, zero, two])
    assert found == [("round-4", ["of round 40"], [])] * 3


def test_copies_do_not_keep_the_groups_of_ranks_alive() -> None:
    placement, copies = OneProcess(), MemoryCopies()
    copies.place(Path(), placement, 1)
    copies.keep("round-1", parts_of(0, 1), placement)
    before = weakref.ref(placement)
    del placement
    gc.collect()
    assert before() is None


def test_one_island_makes_no_copies_but_checkpoints(small: list[str]) -> None:
    copies = MemoryCopies()
    copies.place(Path(), OneProcess(), 1)
    assert not copies.due(1, saves=True, last=False)
    rare = ["--run.checkpoint_every", "1000", "--run.keep_checkpoints", "99"]
    run = make_run(
        "diloco", [*small, *rare, "--run.on_rank_failure", "replace", "--run.copy_every", "2"]
    )
    rounds = [record["round"] for record in run.rounds()]
    run.saving.wait()
    saved = {path.name[:12] for path in list_all(run.folder / "checkpoints")}
    numbers = {0, *range(2, len(rounds), 2), len(rounds)}
    assert len(rounds) > 4 and saved == {f"round-{number:06d}" for number in numbers}


@pytest.mark.parametrize(
    ("places", "receivers"),
    [("abc", [1, 2, 0]), ("aaa", [1, 2, 0]), ("aabb", [2, 3, 0, 1]), ("aaab", [3, 3, 3, 0])],
)
def test_copies_go_to_another_machine(places: str, receivers: list[int]) -> None:
    """A failed machine takes all its islands along."""
    assert next_elsewhere(places) == receivers


def kept_for_disk(folders: list[Path]) -> tuple[list[int], bool, list[list[str]]]:
    """What four ranks keep for others, if each sees its own of these folders."""
    placement = place(4)
    folder, copies = folders[placement.rank], MemoryCopies()
    copies.place(folder, placement, 10)
    due = copies.due(3, saves=True, last=True)
    copies.keep("round-3", parts_of(placement.rank, 3), placement)
    found = folder_owners(folder, placement)
    return found, due, [sorted(copies.parts["round-3"]), sorted(copies.for_disk)]


def test_two_machines_of_two_ranks_keep_each_others_parts_on_disk(tmp_path: Path) -> None:
    """Each machine has a folder; a file that a killed process has left is removed."""
    zero, one = (tmp_path / name for name in ("zero", "one"))
    for folder in (zero, one):
        folder.mkdir()
    (zero / ".seen-before").touch()
    ranks = run_on_ranks(kept_for_disk, 4, [zero, zero, one, one])
    for rank, (found, due, (kept, disk)) in enumerate(ranks):
        assert (found, due) == ([0, 0, 2, 2], True)
        assert disk == sorted(parts_of((rank + 2) % 4, 3))
        assert kept == sorted({*disk, *parts_of(rank, 3)})
    assert not [*zero.iterdir(), *one.iterdir()]
