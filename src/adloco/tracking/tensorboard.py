"""TensorBoard, with its files in the folder tensorboard of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import Tracker, open_with_accelerate


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """TensorBoard, with its files in the folder tensorboard of the run."""

    key: ClassVar[str] = "tensorboard"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # A resumed run writes the rounds after its checkpoint again: purge_step hides the old ones.
        options = {"run_name": self.key, "logging_dir": folder, "purge_step": tokens + 1}
        return open_with_accelerate(self.key, settings, options)
