"""Checkpoints: what goes in comes out, damage is found, old ones go, nothing is half-written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco.run import checkpoint

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


def test_round_trip(tmp_path: Path) -> None:
    assert same(checkpoint.load(checkpoint.save(tmp_path, "a", STATE, keep=1)), STATE)


def test_no_pickle(tmp_path: Path) -> None:
    files = sorted(path.name for path in checkpoint.save(tmp_path, "a", STATE, keep=1).iterdir())
    assert files == ["checksums.json", "state.json", "tensors.safetensors"]
    json.loads((tmp_path / "a" / "state.json").read_text())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for name in ("round-1", "round-2", "round-3"):
        checkpoint.save(tmp_path, name, STATE, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["round-2", "round-3"]
    assert checkpoint.newest(tmp_path).name == "round-3"


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    saved = checkpoint.save(tmp_path, "a", STATE, keep=1)
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(
        ValueError,
        match=(
            f"is damaged .{name} does not match its checksum.; adloco train --resume goes on from "
            "the one before"
        ),
    ):
        checkpoint.load(saved)


def test_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint"):
        checkpoint.newest(tmp_path)
    with pytest.raises(ValueError, match="is damaged .checksums.json cannot be read."):
        checkpoint.load(tmp_path)
    (tmp_path / "checksums.json").write_text("[1]")
    with pytest.raises(ValueError, match="is damaged .checksums.json cannot be read."):
        checkpoint.load(tmp_path)


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, "round-1", STATE, keep=1)
    with pytest.raises(AssertionError, match="which a state cannot hold"):
        checkpoint.save(tmp_path, "round-2", {"bad": object()}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["round-1"]


def test_what_killed_saves_have_left_is_removed(tmp_path: Path) -> None:
    """Killed twice: while writing, and between the two renames of a replacement."""
    checkpoint.save(tmp_path, "round-1", STATE, keep=2)
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / "round-1").rename(tmp_path / ".replaced-round-1")
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["round-1"]
    assert same(checkpoint.load(tmp_path / "round-1"), STATE)

    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".replaced-round-1").mkdir()
    checkpoint.save(tmp_path, "round-1", {"later": 1}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["round-1"]
    assert checkpoint.load(tmp_path / "round-1") == {"later": 1}


def test_a_checkpoint_counts_when_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files, then its folder, then its name in the folder of all."""
    synced: list[Path] = []
    seen: list[bool] = []

    def note(path: Path) -> None:
        synced.append(path)
        seen.append((tmp_path / "a").exists())

    monkeypatch.setattr(checkpoint, "to_disk", note)
    checkpoint.save(tmp_path, "a", STATE, keep=1)
    assert {path.name for path in synced[:3]} == {
        "checksums.json",
        "state.json",
        "tensors.safetensors",
    }
    assert {path.parent for path in synced[:3]} == {synced[3]}
    assert synced[4:] == [tmp_path]
    assert seen == [False, False, False, False, True]
