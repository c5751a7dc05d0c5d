"""Writes and reads checkpoints atomically: tensors as safetensors, everything else as JSON, with
checksums of both files. No pickle; `distributed/plain_state.py` says what a state may contain.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from adloco.distributed.plain_state import join_state, split_state
from adloco.errors import require

FORMAT = "adloco checkpoint 2"
TENSORS, STATE, CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"


def save(folder: Path, name: str, state: Any, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Args:
        folder: Folder of all checkpoints of the run.
        name: Name of this checkpoint's subfolder. Names must sort by age.
        state: See `distributed/plain_state.py` for what it may contain.
        keep: Number of checkpoints to keep, this one included.

    Returns:
        The checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        plain, tensors = split_state(state)
        whole = {path: tensor.detach().cpu().contiguous() for path, tensor in tensors.items()}
        save_file(whole, temporary / TENSORS)
        (temporary / STATE).write_text(json.dumps({"format": FORMAT, "state": plain}))
        (temporary / CHECKSUMS).write_text(
            json.dumps({part: _checksum(temporary / part) for part in (TENSORS, STATE)})
        )
        make_readable(temporary)
        _to_disk(temporary)
        target = folder / name
        if target.exists():
            target.replace(temporary.with_name(f"{temporary.name}-old"))
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(f"{temporary.name}-old"), ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def make_readable(folder: Path) -> None:
    """Make a folder and its files readable for all users; tempfile and safetensors let only the
    owner read them.
    """
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    return sorted(
        path.parent
        for path in folder.glob(f"*/{CHECKSUMS}")
        if not path.parent.name.startswith(".")
    )


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
        ValueError: A file is missing or damaged, or another version or program wrote it.
    """
    try:
        expected = json.loads((checkpoint / CHECKSUMS).read_text())
        damaged = [
            part for part in (TENSORS, STATE) if _checksum(checkpoint / part) != expected[part]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{checkpoint} is not a checkpoint of adloco; name a run folder that `adloco train` "
            "wrote"
        ) from error
    advice = "remove it to resume from the one before"
    require(
        not damaged,
        f"checkpoint {checkpoint} is damaged ({', '.join(damaged)} does not match its checksum); "
        f"{advice}",
    )
    saved = json.loads((checkpoint / STATE).read_text())
    require(
        saved.get("format") == FORMAT,
        f"checkpoint {checkpoint} has format {saved.get('format')!r}, but this version of adloco "
        f"reads {FORMAT!r}; use the version that wrote it",
    )
    # Copies, because the file may be memory-mapped and removed later.
    tensors = {path: found.clone() for path, found in load_file(checkpoint / TENSORS).items()}
    return join_state(saved["state"], tensors)


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _to_disk(folder: Path) -> None:
    """Make sure that the files are on disk before the folder gets its final name."""
    for file in folder.iterdir():
        with file.open("rb") as content:
            os.fsync(content.fileno())
