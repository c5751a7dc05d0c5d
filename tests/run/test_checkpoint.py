"""Checkpoints: what goes in comes out, damage is found, old ones go, no part is half-written."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco import whole_file
from adloco.run import checkpoint
from adloco.run.checkpoint import BestRound
from adloco.run.part_file import DamagedCheckpointError, read_part, write_part

STATE: dict[str, Any] = {
    "tensors": [
        torch.randn(3, 2),
        torch.tensor(2.5),
        torch.zeros(0),
        torch.arange(4, dtype=torch.uint8),
    ],
    "nested": {
        "betas": (0.9, 0.95),
        "none": None,
        "flag": True,
        "text": "h\u00e9",
        0: {"by number": torch.ones(1, dtype=torch.float64)},
    },
    "numbers": [1, 0.1 + 0.2, 1e300, -0.0, 2**60],
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.equal(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def save(folder: Path, name: str) -> Path:
    """A checkpoint of nothing but its part `run`."""
    (folder / name).mkdir()
    write_part(folder / name, "run", {})
    return folder / name


@pytest.mark.parametrize("state", [STATE, {}], ids=["all kinds", "nothing"])
def test_round_trip(state: dict[str, Any], tmp_path: Path) -> None:
    write_part(tmp_path, "worker-0", state)
    assert same(read_part(tmp_path, "worker-0"), state)
    assert read_part(tmp_path, "worker-1") is None


def test_tensors_that_are_views_of_one_memory(tmp_path: Path) -> None:
    """Live states can have them: masks of all blocks of a model, for instance."""
    memory = torch.arange(6.0)
    state = {"views": [memory, memory, memory.view(2, 3), memory[2:4], memory[4:]]}
    write_part(tmp_path, "a", state)
    assert same(read_part(tmp_path, "a"), state)


def test_no_pickle_and_checksums_that_others_can_check(tmp_path: Path) -> None:
    """`sha256sum --check` reads lines of a checksum, two spaces and a name."""
    write_part(tmp_path, "a", STATE)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.safetensors", "a.sha256"}
    json.loads((tmp_path / "a.json").read_text())
    lines = [
        f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("a.json", "a.safetensors")
    ]
    assert (tmp_path / "a.sha256").read_text() == "".join(lines)


@pytest.mark.parametrize("name", ["a.safetensors", "a.json", "a.sha256"])
def test_a_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    write_part(tmp_path, "a", STATE)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 4] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        DamagedCheckpointError,
        match=(
            "is damaged .a.[a-z]* does not match its checksum.; a resumed run continues from "
            "the one before"
        ),
    ):
        read_part(tmp_path, "a")


def test_a_part_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after any of the steps of a part leaves it unread, until all are on disk."""
    steps: list[tuple[str, bool]] = []

    def note(path: Path) -> None:
        steps.append((path.name, read_part(tmp_path, "a") is not None))

    monkeypatch.setattr(whole_file, "to_disk", note)
    write_part(tmp_path, "a", STATE)
    folder = tmp_path.name
    assert steps == [
        (".a.json", False),
        (".a.safetensors", False),
        (".a.sha256", False),
        (folder, True),
    ]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which a checkpoint cannot hold"):
        write_part(tmp_path, "a", {"bad": object()})
    assert not list(tmp_path.iterdir())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for name in ("round-1", "round-2", "round-3"):
        save(tmp_path, name)
    (tmp_path / "round-0").mkdir()
    write_part(tmp_path / "round-0", "worker-1", {})
    checkpoint.remove_old(tmp_path, "round-3", 2)
    assert [path.name for path in checkpoint.list_all(tmp_path)] == ["round-2", "round-3"]
    checkpoint.remove_old(tmp_path, "round-3", 1)
    assert checkpoint.newest(tmp_path).name == "round-3"
    assert len(list(tmp_path.iterdir())) == 1


def record(round: int, loss: float | None) -> dict[str, Any]:
    return {"round": round, "inner_steps": 10 * round, "val_loss": loss}


def test_the_best_is_kept_besides_the_newest(tmp_path: Path) -> None:
    """Round 2 has the lowest loss that is a number; round 4 is as good, but later. The checkpoint
    within round 3 has none.
    """
    losses = [(1, 3.0), (2, 1.0), (3, 0.5), (4, 1.0), (5, math.nan), (6, None)]
    records = [record(round, loss) for round, loss in losses]
    names = [checkpoint.name_of(round, 10 * round + 2 * (round == 3)) for round, _ in losses]
    assert names[:3:2] == ["round-000001-step-00000010", "round-000003-step-00000032"]
    known = checkpoint.losses_of(records)
    assert checkpoint.best_name(names, known) == names[1]
    assert checkpoint.best_name(names[:1] + names[3:], known) == names[3]
    assert checkpoint.best_name(names[4:], known) == ""
    best = BestRound()
    assert [best.add([each]) for each in records] == [True] * 3 + [False] * 3
    for name in names:
        save(tmp_path, name)
    checkpoint.remove_old(tmp_path, names[-1], 2, names[1])
    assert [path.name for path in checkpoint.list_all(tmp_path)] == [names[1], *names[-2:]]
    assert checkpoint.best(tmp_path, records).name == names[1]
    with pytest.raises(ValueError, match="train with run.keep_best, or leave out --best"):
        checkpoint.best(tmp_path, records[-1:])


def test_a_loss_on_fewer_texts_is_another_loss() -> None:
    """From round 3 on one of two islands is left. Round 4 was not evaluated."""
    losses = [(1, 1.0, 2), (2, 2.0, 2), (3, 4.0, 1), (4, None, 0), (5, 3.0, 1), (6, 5.0, 1)]
    records = [record(round, loss) | {"islands": [{}] * number} for round, loss, number in losses]
    assert [*checkpoint.losses_of(records).values()] == [4.0, 3.0, 5.0]
    assert [*checkpoint.losses_of(records[:2]).values()] == [1.0, 2.0]
    best = BestRound()
    assert [best.add([each]) for each in records] == [True, False, True, False, True, False]
    resumed = BestRound()
    assert resumed.add(records[:3]) and not resumed.add(records[5:])
    names = [checkpoint.name_of(round, 10 * round) for round, _, _ in losses]
    assert best.spared(names) == names[4]


def test_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint"):
        checkpoint.newest(tmp_path)
    with pytest.raises(ValueError, match="is damaged .run is missing."):
        checkpoint.need(tmp_path, "run")
    for content in (b"\xff{", b"[1]"):
        (tmp_path / "run.sha256").write_bytes(content)
        with pytest.raises(ValueError, match="is damaged .run."):
            checkpoint.need(tmp_path, "run")
