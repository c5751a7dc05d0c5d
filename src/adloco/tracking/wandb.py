"""Weights & Biases, in the project WANDB_PROJECT or adloco."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import PROJECT, Tracker, open_with_accelerate


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Weights & Biases, in the project WANDB_PROJECT or adloco."""

    key: ClassVar[str] = "wandb"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        options = {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), "name": folder.name}
        return open_with_accelerate(self.key, settings, options)
