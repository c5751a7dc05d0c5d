"""TensorBoard, with its files in the folder tensorboard of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import Tracker, open_with_accelerate

OVER_BYTES = "over_bytes"
"""The group of the losses whose step is bytes, and the folder of their files."""


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """TensorBoard, with its files in the folder tensorboard of the run."""

    key: ClassVar[str] = "tensorboard"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # A resumed run writes the rounds after its checkpoint again: purge_step hides the old ones.
        options = {"run_name": self.key, "logging_dir": folder, "purge_step": tokens + 1}
        return _TokensAndBytes(open_with_accelerate(self.key, settings, options), folder / self.key)


class _TokensAndBytes:
    """Logs all numbers with tokens as the step, and the losses with bytes as the step too, because
    TensorBoard draws every number over its step.
    """

    def __init__(self, over_tokens: Tracker, folder: Path) -> None:
        self._trackers = [over_tokens]
        self._folder = folder

    def log(self, values: dict[str, Any], step: int) -> None:
        self._trackers[0].log(values, step)
        sent = int(values.get("bytes_communicated", 0))
        if not sent:  # A run in which nothing is synced has no such curve, and no such folder.
            return
        if len(self._trackers) == 1:
            # Files of their own: purge_step counts tokens. What a resumed run logs again is equal.
            options = {"run_name": OVER_BYTES, "logging_dir": self._folder}
            self._trackers.append(open_with_accelerate(TensorBoard.key, {}, options))
        losses = {
            f"{OVER_BYTES}/{name}": value
            for name, value in values.items()
            if name == "train_loss" or name.startswith("val_")
        }
        self._trackers[1].log(losses, sent)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
