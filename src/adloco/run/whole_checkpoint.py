"""Reads checkpoints of earlier versions, which have the state of all workers in one file."""

import json
from pathlib import Path
from typing import Any

from adloco.algorithms.state_parts import RUN, split_whole
from adloco.distributed.plain_state import join_state
from adloco.run.part_file import DamagedCheckpointError, check, read_tensors, require_format

FORMAT = "adloco checkpoint 2"
TENSORS, STATE, CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"


def is_whole(checkpoint: Path) -> bool:
    """True if a folder has files of such a checkpoint."""
    return any((checkpoint / file).exists() for file in (TENSORS, STATE, CHECKSUMS))


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """The parts of the state of such a checkpoint, by name.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        ValueError: Another version or program wrote it.
    """
    try:
        expected = dict(json.loads((checkpoint / CHECKSUMS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpointError(checkpoint, f"{CHECKSUMS} cannot be read") from error
    check(checkpoint, {file: expected.get(file) for file in (TENSORS, STATE)})
    saved = json.loads((checkpoint / STATE).read_text())
    require_format(checkpoint, saved.get("format"), FORMAT)
    state = join_state(saved["state"], read_tensors(checkpoint / TENSORS))
    if not isinstance(state, dict) or not {"run", "algorithm"} <= state.keys():
        return {RUN: state}  # Of another program; who reads it says so.
    parts = split_whole(state["algorithm"])
    return {**parts, RUN: {"run": state["run"], "algorithm": parts[RUN]}}
