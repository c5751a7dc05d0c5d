"""Writes and reads a part of a checkpoint: its tensors as safetensors, everything else as JSON, and
the checksums of both, which are written last. No pickle; `distributed/plain_state.py` says what a
state may contain. safetensors imports torch, which commands that only list checkpoints do without.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adloco.distributed.plain_state import join_state, split_state
from adloco.errors import require
from adloco.whole_file import checksum, write_text, written_whole

FORMAT = "adloco checkpoint 9"
TENSORS, STATE, CHECKSUMS = ".safetensors", ".json", ".sha256"
"""Endings of the files of a part. `sha256sum --check` reads the last one too."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or not what was written; `damage` says which, and how."""

    def __init__(self, checkpoint: Path, damage: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint} is damaged ({damage}); a resumed run continues from the one "
            "before"
        )
        self.damage = damage


def write_part(checkpoint: Path, name: str, state: Any) -> None:
    """Write a part of a checkpoint, whose folder exists. When it returns, the part is on disk, also
    after a power cut; OSError if it cannot be written.

    state: The part's content, with contiguous tensors on the CPU.
    """
    files = [f"{name}{end}" for end in (STATE, TENSORS)]
    plain, tensors = split_state(state)
    # `json.dump` would take twice as long, from threads that train.
    text = json.dumps({"format": FORMAT, "state": plain})
    with written_whole(checkpoint / files[0]) as temporary, temporary.open("x") as out:
        out.write(text)
    with written_whole(checkpoint / files[1]) as temporary:
        try:
            save_tensors(tensors, temporary)
        except SafetensorError as error:  # On a full disk, for instance.
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else None, str(error)) from error
        # safetensors lets only the owner read its file.
        temporary.chmod((checkpoint / files[0]).stat().st_mode & 0o777)
    lines = [f"{checksum(checkpoint / file)}  {file}\n" for file in files]
    write_text(checkpoint / f"{name}{CHECKSUMS}", "".join(lines))


def read_part(checkpoint: Path, name: str, *, with_tensors: bool = True) -> Any:
    """The content of a part, with its tensors on the CPU; None if it was not written, or not whole.

    with_tensors: False for None in their places, which needs no torch.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        ValueError: Another version wrote it.
    """
    checksums = checkpoint / f"{name}{CHECKSUMS}"
    if not checksums.exists():
        return None
    try:
        if not checksums.is_file():
            raise OSError("a pipe, for instance, which would be waited for")
        expected = {line[66:]: line[:64] for line in checksums.read_text().splitlines()}
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(checkpoint, f"{checksums.name} cannot be read") from error
    files = [f"{name}{end}" for end in (TENSORS, STATE)]
    wrong = [file for file in files if not _matches(checkpoint / file, expected.get(file))]
    if wrong:
        raise DamagedCheckpointError(checkpoint, f"{', '.join(wrong)} does not match its checksum")
    saved = json.loads((checkpoint / files[1]).read_text())
    require(
        saved.get("format") == FORMAT,
        f"checkpoint {checkpoint} has format {saved.get('format')!r}, but this version of adloco "
        f"reads {FORMAT!r}; use the version that wrote it",
    )
    tensors = read_tensors(checkpoint / files[0]) if with_tensors else defaultdict(lambda: None)
    return join_state(saved["state"], tensors)


def save_tensors(tensors: dict[str, Any], file: Path) -> None:
    """Write tensors to a file; SafetensorError if that fails."""
    from safetensors.torch import save_file

    # Buffers of a model may be views of one memory, which safetensors refuses.
    known, own = set[int](), dict[str, Any]()
    for path, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        own[path] = tensor.clone() if memory in known else tensor
        known.add(memory)
    save_file(own, file)


def read_tensors(file: Path) -> dict[str, Any]:
    """The tensors of a file, in memory of their own: the file may be removed later."""
    from safetensors.torch import load_file

    return {path: found.clone() for path, found in load_file(file).items()}


def _matches(file: Path, expected: Any) -> bool:
    """True if the file can be read and has this checksum."""
    try:
        # A pipe would be waited for.
        return file.is_file() and bool(checksum(file) == expected)
    except OSError:
        return False
