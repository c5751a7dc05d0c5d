"""Damaged folders: a run continues from its newest good checkpoint, and what is gone is named."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco import place, whole_file
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.placement.placement import OneProcess
from adloco.distributed.testing import run_on_ranks
from adloco.run import part_file, records, saving
from adloco.run.checkpoint import list_all, list_checkpoints, need
from adloco.run.part_file import DamagedCheckpointError, write_part
from adloco.run.recovery import clear_unusable, load_newest_good
from adloco.run.training_run import TrainingRun
from tests.problems import without_timings


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def numbers(file: Path) -> list[dict[str, Any]]:
    return [without_timings(json.loads(line)) for line in file.read_text().splitlines()]


NUMBERS = {"trainers": [{"trainer": 0, "workers": [0, 1]}]}
PARTS = ("run", "trainer-0", "worker-0", "worker-1")
WORKERS = (0, 1)


def save(folder: Path, number: int, parts: Sequence[str] = PARTS) -> Path:
    """Parts of a checkpoint of a trainer with two workers."""
    checkpoint = folder / f"round-{number}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    for part in parts:
        numbers = {"run": {}, "algorithm": NUMBERS} if part == "run" else {}
        found = {"round": number, "save": f"of round {number}", "tensor": torch.ones(3)}
        write_part(checkpoint, part, numbers | found)
    return checkpoint


def damage(kind: str, checkpoint: Path) -> str:
    """Damage a checkpoint; returns what is said about it."""
    if kind == "flipped":
        flip(checkpoint / "worker-1.safetensors")
        return "worker-1.safetensors does not match its checksum"
    if kind == "missing":
        (checkpoint / "run.json").unlink()
        return "run.json does not match its checksum"
    if kind.startswith("pipe"):
        file = checkpoint / kind.removeprefix("pipe ")
        file.unlink()
        os.mkfifo(file)
        sums = file.suffix == ".sha256"
        return f"{file.name} {'cannot be read' if sums else 'does not match its checksum'}"
    (checkpoint / "trainer-0.sha256").write_bytes(b"\xff{")
    return "trainer-0.sha256 cannot be read"


@pytest.mark.parametrize(
    "kind", ["flipped", "missing", "unreadable", "pipe run.json", "pipe worker-0.sha256"]
)
def test_the_newest_good_checkpoint_is_found(kind: str, tmp_path: Path) -> None:
    for number in range(1, 5):
        save(tmp_path, number)
    text = damage(kind, tmp_path / "round-4")
    damage("flipped", tmp_path / "round-3")
    found = load_newest_good(tmp_path, OneProcess(), WORKERS, {})
    assert found.checkpoint.name == "round-2"
    assert {part: state["round"] for part, state in found.parts.items()} == dict.fromkeys(PARTS, 2)
    assert clear_unusable(tmp_path, found, OneProcess())[0] == (
        f"checkpoint {tmp_path / 'round-4'} is damaged ({text}) and is now called "
        "damaged-round-4; the run continues from round-2"
    )
    assert [path.name for path in list_all(tmp_path)] == ["round-1", "round-2"]
    # Of the same round, damaged again.
    damage(kind, save(tmp_path, 4))
    clear_unusable(tmp_path, load_newest_good(tmp_path, OneProcess(), WORKERS, {}), OneProcess())
    assert not (tmp_path / "round-4").exists()
    for name in ("round-1", "round-2"):
        flip(tmp_path / name / "run.json")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is good \(round-2: run.json does"):
        load_newest_good(tmp_path, OneProcess(), WORKERS, {})
    assert len(list_all(tmp_path)) == 2, "nothing is renamed then"


@pytest.mark.parametrize("written", [PARTS[:3], PARTS[1:]], ids=["a worker", "run"])
def test_a_save_that_was_cut_off_does_not_count(written: Sequence[str], tmp_path: Path) -> None:
    """Killed between two parts: on another island, or on that of rank 0."""
    save(tmp_path, 1)
    cut = save(tmp_path, 2, written)
    found = load_newest_good(tmp_path, OneProcess(), WORKERS, {})
    assert found.checkpoint.name == "round-1"
    (lacks,) = {*PARTS} - {*written}
    assert clear_unusable(tmp_path, found, OneProcess()) == [
        f"checkpoint {cut} was not written to its end ({lacks} is missing) and is removed; the run "
        "continues from round-1"
    ]
    assert list_all(tmp_path) == [tmp_path / "round-1"]


def copied(part: str, source: Path, target: Path) -> None:
    for file in source.glob(f"{part}.*"):
        shutil.copy(file, target)


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_different_saves_make_no_checkpoint(part: str, tmp_path: Path) -> None:
    """One was copied by hand, with its checksums."""
    first, second, third = (save(tmp_path, number) for number in (1, 2, 3))
    copied(part, second, third)
    found = load_newest_good(tmp_path, OneProcess(), WORKERS, {})
    assert found.checkpoint == second
    others = PARTS[1:] if part == "run" else [part]
    wrong = "; ".join(f"{each} is of another save than run" for each in others)
    assert [each.damage for each in found.unusable] == [wrong]
    copied("trainer-0", first, second)
    with pytest.raises(DamagedCheckpointError, match="trainer-0 is of another save than run"):
        need(second, "trainer-0")


def found_by_a_rank(folders: list[Path]) -> tuple[str, list[str], int]:
    """What a rank that reads its own folder continues from, and the bytes it has received."""
    try:
        placement = place(2)
        found = load_newest_good(folders[this_rank()], placement, WORKERS, {})
        clear_unusable(folders[this_rank()], found, placement)
    except ValueError as error:
        return str(error), [], 0
    assert {part["round"] for part in found.parts.values()} == {int(found.checkpoint.name[-1])}
    return found.checkpoint.name, sorted(found.parts), found.bytes_received


def test_islands_without_a_shared_folder(tmp_path: Path) -> None:
    """Each has what it has written; of four checkpoints only the first is good everywhere."""
    zero, one = folders = [tmp_path / "zero", tmp_path / "one"]
    for number in range(1, 4):
        save(zero, number, PARTS[:3])
    for number in (1, 2):
        save(one, number, PARTS[3:])
    flip(one / "round-2" / "worker-1.json")
    expected = [
        ("round-1", ["run", "trainer-0", "worker-0"], 0),
        ("round-1", ["run", "trainer-0", "worker-1"], 2 * 3 * 4),
    ]
    save(zero, 4)
    copied("run", save(one, 5), save(one, 4))
    shutil.rmtree(one / "round-5")
    assert run_on_ranks(found_by_a_rank, 2, folders) == expected
    left = ["damaged-round-2", "damaged-round-4", "round-1"]
    assert [path.name for path in sorted(zero.iterdir())] == left
    assert [path.name for path in sorted(one.iterdir())] == left
    (one / "round-1" / "worker-1.sha256").unlink()
    sentence = (
        f"no checkpoint in {zero} is good (round-1: worker-1 is missing); bring back the files, or "
        "start the run again in another folder"
    )
    first, second = run_on_ranks(found_by_a_rank, 2, folders)
    assert first[0] == sentence
    assert second[0] == sentence.replace("zero", "one")


def test_a_checkpoint_of_another_version_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(part_file, "FORMAT", "adloco checkpoint 99")
        save(tmp_path, 1)
    with pytest.raises(ValueError, match="has format 'adloco checkpoint 99'"):
        load_newest_good(tmp_path, OneProcess(), WORKERS, {})


def test_a_damaged_run_resumes_bit_for_bit(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint is damaged, and a line of an earlier round is lost."""
    run = tmp_path / "run"
    often = ["--run.tokens", "4096", "--run.checkpoint_every", "1"]
    assert main(["train", "diloco", *small, *often]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    expected = numbers(run / "metrics.jsonl")
    before, newest = list_checkpoints(run / "checkpoints")
    tensors = (newest / "worker-0.safetensors").read_bytes()
    flip(newest / "worker-0.safetensors")
    (run / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().out
    log = (run / "train.log").read_text()
    for text in (
        f"checkpoint {newest} is damaged (worker-0.safetensors does not match its checksum) and "
        f"is now called damaged-{newest.name}; the run continues from {before.name}",
        f"{run / 'metrics.jsonl'} has lost the lines of 1 of the {len(lines) - 1} rounds up to the "
        "checkpoint; the report leaves them out",
    ):
        assert text in said
        assert f"WARNING {text}" in log
    assert (newest / "worker-0.safetensors").read_bytes() == tensors
    assert numbers(run / "metrics.jsonl") == [*expected[:1], *expected[2:]]
    assert not list((run / "checkpoints").glob(".*"))
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert f"has lost the lines of 1 of the {len(lines)} rounds" in capsys.readouterr().out


def another_loss(lines: list[str]) -> list[str]:
    return [lines[0], json.dumps(json.loads(lines[1]) | {"val_loss": 0.5}) + "\n", *lines[2:]]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("metrics.jsonl", another_loss),
        ("metrics.jsonl", lambda lines: lines[:2] + lines[1:]),
        ("steps.jsonl", lambda lines: lines[:1] + lines),
    ],
)
def test_records_that_were_changed_are_refused(
    file: str,
    change: Callable[[list[str]], list[str]],
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    assert main(["train", "diloco", *small, "--run.tokens", "2048"]) == 0
    lines = (run / file).read_text().splitlines(keepends=True)
    (run / file).write_text("".join(change(lines)))
    commands = [["train", "--resume"], ["report"], ["evaluate"]]
    if change is another_loss:  # What is behind the checkpoint's lines, compare reads later.
        commands.append(["compare", "diloco"])
    for words in commands if file == "metrics.jsonl" else commands[:2]:
        capsys.readouterr()
        assert main([*words, str(run)]) == 2
        error = capsys.readouterr().err
        assert f"{run / file} is not what the run wrote" in error or f"of {run / file} is" in error


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
    monkeypatch.setattr(whole_file, "to_disk", lambda path: synced.append(path.name))
    monkeypatch.setattr(records, "to_disk", lambda path: synced.append(path.name))
    monkeypatch.setattr(saving, "to_disk", lambda path: synced.append(path.name))
    flags, _ = take_settings([*small, "--run.tokens", "2048", "--run.checkpoint_every", "1"])
    run = TrainingRun.create(build_recipe(override(read_values("single"), flags)))
    assert synced[-2] == ".run.sha256"
    synced.clear()
    next(run.rounds())
    run.saving.wait()
    begins = synced.index(".run.json")
    assert {"metrics.jsonl", "steps.jsonl", "checkpoints"} <= {*synced[:begins]}
    files = [name for name in synced if name.endswith(".sha256")]
    assert files == [".trainer-0.sha256", ".worker-0.sha256", ".run.sha256"]
