"""Writes and reads checkpoints atomically: tensors as safetensors, everything else as JSON, with
checksums of both files. No pickle; `distributed/plain_state.py` says what a state may contain.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adloco.distributed.plain_state import join_state, split_state
from adloco.errors import require
from adloco.whole_file import checksum, to_disk

FORMAT = "adloco checkpoint 2"
TENSORS, STATE, CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"
WRITING, REPLACED = ".writing-", ".replaced-"
"""What the names of folders begin with while a checkpoint is written, and while it takes the place
of one of the same name.
"""
DAMAGED = "damaged-"
"""What the names of damaged checkpoints begin with that `set_aside` has renamed."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or not what was written.

    Attributes:
        checkpoint: Its folder.
        damage: Which files, and what is wrong with them.
    """

    def __init__(self, checkpoint: Path, damage: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint} is damaged ({damage}); adloco train --resume goes on from "
            "the one before"
        )
        self.checkpoint = checkpoint
        self.damage = damage


def save(folder: Path, name: str, state: Any, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`, and what killed saves have left.

    When it returns, the checkpoint is on disk, also after a power cut.

    Args:
        folder: Folder of all checkpoints of the run.
        name: Name of this checkpoint's subfolder. Names must sort by age.
        state: See `distributed/plain_state.py` for what it may contain.
        keep: Number of checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It cannot be written; what was there before is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=folder))
    try:
        plain, tensors = split_state(state)
        whole = {path: tensor.detach().cpu().contiguous() for path, tensor in tensors.items()}
        try:
            save_file(whole, temporary / TENSORS)
        except SafetensorError as error:  # On a full disk, for instance.
            raise OSError(str(error)) from error
        (temporary / STATE).write_text(json.dumps({"format": FORMAT, "state": plain}))
        (temporary / CHECKSUMS).write_text(
            json.dumps({part: checksum(temporary / part) for part in (TENSORS, STATE)})
        )
        make_readable(temporary)
        for path in (*temporary.iterdir(), temporary):
            to_disk(path)
        target = folder / name
        if target.exists():
            target.replace(folder / f"{REPLACED}{name}")
        temporary.replace(target)
        to_disk(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_leftovers(folder)
    oldest = list_checkpoints(folder)[-keep:][0]
    for old in list_all(folder):
        if old < oldest:
            shutil.rmtree(old, ignore_errors=True)
    return target


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves have left. Call it only with the run's lock held.

    A checkpoint that was to be replaced gets its name back if the new one did not get there.
    """
    for unfinished in folder.glob(f"{WRITING}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for replaced in folder.glob(f"{REPLACED}*"):
        target = folder / replaced.name.removeprefix(REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.replace(target)


def make_readable(folder: Path) -> None:
    """Give a folder and its files the modes that the umask allows; tempfile and safetensors let
    only the owner read them.
    """
    probe = folder / "mode"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    folder.chmod(mode)
    for file in folder.iterdir():
        file.chmod(mode & 0o666)


def list_all(folder: Path) -> list[Path]:
    """Checkpoints in a folder, damaged ones included that were not set aside, oldest first."""
    return sorted(
        path
        for path in folder.glob("*")
        if any((path / part).exists() for part in (TENSORS, STATE, CHECKSUMS))
        and not path.name.startswith((".", DAMAGED))
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    return [path for path in list_all(folder) if (path / CHECKSUMS).exists()]


def newest(folder: Path) -> Path:
    """The newest checkpoint in a folder; ValueError if it has none."""
    found = list_checkpoints(folder)
    require(bool(found), f"{folder} has no checkpoint; start the run again in another folder")
    return found[-1]


def of_round(folder: Path, round: int) -> Path:
    """The newest checkpoint of a round in a folder; ValueError if none is kept."""
    newest(folder)
    named = [(int(path.name.split("-")[1]), path) for path in list_checkpoints(folder)]
    found = [path for number, path in named if number == round]
    kept = ", ".join(str(number) for number in sorted({number for number, _ in named}))
    require(
        bool(found),
        f"{folder} has no checkpoint of round {round}; those of rounds {kept} are kept "
        "(run.keep_checkpoints, run.checkpoint_every)",
    )
    return found[-1]


def load(checkpoint: Path) -> Any:
    """Read the state of a checkpoint, with its tensors on the CPU.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        ValueError: Another version or program wrote it.
    """
    try:
        expected = dict(json.loads((checkpoint / CHECKSUMS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpointError(checkpoint, f"{CHECKSUMS} cannot be read") from error
    wrong = [
        part for part in (TENSORS, STATE) if not _matches(checkpoint / part, expected.get(part))
    ]
    if wrong:
        raise DamagedCheckpointError(checkpoint, f"{', '.join(wrong)} does not match its checksum")
    saved = json.loads((checkpoint / STATE).read_text())
    require(
        saved.get("format") == FORMAT,
        f"checkpoint {checkpoint} has format {saved.get('format')!r}, but this version of adloco "
        f"reads {FORMAT!r}; use the version that wrote it",
    )
    # Copies, because the file may be memory-mapped and removed later.
    tensors = {path: found.clone() for path, found in load_file(checkpoint / TENSORS).items()}
    return join_state(saved["state"], tensors)


def _matches(file: Path, expected: Any) -> bool:
    """True if the file can be read and has this checksum."""
    try:
        return bool(checksum(file) == expected)
    except OSError:
        return False
