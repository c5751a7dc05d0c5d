"""Damaged folders: a run goes on from its newest good checkpoint, and what is gone is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from adloco import place
from adloco.cli.arguments import take_settings
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.testing import run_on_ranks
from adloco.run import checkpoint, records
from adloco.run.recovery import load_newest_good, set_aside
from adloco.run.training_run import TrainingRun
from tests.problems import without_timings


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def numbers(file: Path) -> list[dict[str, Any]]:
    return [without_timings(json.loads(line)) for line in file.read_text().splitlines()]


def damage(kind: str, folder: Path) -> str:
    """Damage a checkpoint; returns what is said about it."""
    if kind == "flipped":
        flip(folder / "tensors.safetensors")
        return "tensors.safetensors does not match its checksum"
    if kind == "missing":
        (folder / "state.json").unlink()
        return "state.json does not match its checksum"
    if kind == "unreadable":
        (folder / "checksums.json").write_bytes(b"\xff{")
    else:
        (folder / "checksums.json").unlink()
    return "checksums.json cannot be read"


@pytest.mark.parametrize("kind", ["flipped", "missing", "unreadable", "without checksums"])
def test_the_newest_good_checkpoint_is_found(kind: str, tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint.save(tmp_path, f"round-{number}", {"round": number}, keep=4)
    found = damage(kind, tmp_path / "round-4")
    damage("flipped", tmp_path / "round-3")
    chosen, state, damaged = load_newest_good(tmp_path, OneProcess())
    assert (chosen.name, state) == ("round-2", {"round": 2})
    assert set_aside(damaged, chosen)[0] == (
        f"checkpoint {tmp_path / 'round-4'} is damaged ({found}) and is now called "
        "damaged-round-4; the run goes on from round-2"
    )
    assert [path.name for path in checkpoint.list_all(tmp_path)] == ["round-1", "round-2"]
    # Of the same round, damaged again.
    checkpoint.save(tmp_path, "round-4", {"round": 4}, keep=4)
    damage(kind, tmp_path / "round-4")
    chosen, _, damaged = load_newest_good(tmp_path, OneProcess())
    assert len(set_aside(damaged, chosen)) == 1
    for name in ("round-1", "round-2"):
        flip(tmp_path / name / "state.json")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is good \(round-2: state.json does"):
        load_newest_good(tmp_path, OneProcess())
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2, "nothing is renamed then"


def chosen_by_a_rank(folders: list[Path]) -> str:
    """What a rank that reads its own folder goes on from."""
    try:
        return load_newest_good(folders[this_rank()], place(2))[0].name
    except ValueError as error:
        return str(error)


def test_rank_0_chooses_for_all(tmp_path: Path) -> None:
    folders = [tmp_path / "zero", tmp_path / "one"]
    for folder in folders:
        for number in range(1, 4):
            checkpoint.save(folder, f"round-{number}", {"round": number}, keep=3)
    flip(folders[0] / "round-3" / "state.json")
    assert run_on_ranks(chosen_by_a_rank, 2, folders) == ["round-2", "round-2"]
    flip(folders[1] / "round-2" / "state.json")
    of_zero, of_one = run_on_ranks(chosen_by_a_rank, 2, folders)
    assert of_zero == "round-2"
    assert of_one.startswith(f"checkpoint {folders[1] / 'round-2'} is damaged (state.json")


def test_a_checkpoint_of_another_version_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", "adloco checkpoint 99")
        checkpoint.save(tmp_path, "round-1", {}, keep=1)
    with pytest.raises(ValueError, match="has format 'adloco checkpoint 99'"):
        load_newest_good(tmp_path, OneProcess())


def test_a_damaged_run_goes_on_bit_for_bit(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint is damaged, a kill has come between the two renames of the one before,
    and a line of an earlier round is lost.
    """
    run = tmp_path / "run"
    often = ["--run.tokens", "4096", "--run.checkpoint_every", "1"]
    assert main(["train", "diloco", *small, *often]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    expected = numbers(run / "metrics.jsonl")
    before, newest = checkpoint.list_checkpoints(run / "checkpoints")
    before.rename(before.with_name(f".replaced-{before.name}"))
    tensors = (newest / "tensors.safetensors").read_bytes()
    flip(newest / "tensors.safetensors")
    (run / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    (run / "checkpoints" / ".writing-killed").mkdir()
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().out
    log = (run / "train.log").read_text()
    for text in (
        f"checkpoint {newest} is damaged (tensors.safetensors does not match its checksum) and is "
        f"now called damaged-{newest.name}; the run goes on from {before.name}",
        f"{run / 'metrics.jsonl'} has lost the lines of round 2; the run goes on from its "
        f"checkpoint of round {len(lines) - 1}",
    ):
        assert text in said
        assert f"WARNING {text}" in log
    assert (newest / "tensors.safetensors").read_bytes() == tensors
    assert numbers(run / "metrics.jsonl") == [*expected[:1], *expected[2:]]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    small: list[str], tmp_path: Path
) -> None:
    """By the same line and by --resume, with the same numbers."""
    run, words = tmp_path / "run", ["train", "diloco", *small, "--run.tokens", "2048"]
    assert main(words) == 0
    expected = numbers(run / "metrics.jsonl")
    prepared = {"environment.json", "recipe.toml", "tokenizer", "model"}
    for line in (words, ["train", "--resume", str(run)]):
        for path in [path for path in run.iterdir() if path.name not in prepared]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert main(line) == 0
        assert numbers(run / "metrics.jsonl") == expected


def test_records_are_on_disk_before_a_checkpoint_counts(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpoint, "to_disk", lambda path: synced.append(path.name))
    monkeypatch.setattr(records, "to_disk", lambda path: synced.append(path.name))
    flags, _ = take_settings([*small, "--run.tokens", "2048", "--run.checkpoint_every", "1"])
    rounds = TrainingRun.create(build_recipe(override(read_values("single"), flags))).rounds()
    first = synced.copy()
    next(rounds)
    assert first[-1] == "checkpoints"
    assert synced[len(first) :][:3] == ["metrics.jsonl", "steps.jsonl", "run"]
    assert len(synced) == len(first) + 3 + 5
