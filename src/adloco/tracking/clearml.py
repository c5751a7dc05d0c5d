"""ClearML, in the project adloco."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import PROJECT, Tracker, open_with_accelerate


@dataclass(frozen=True, kw_only=True)
class ClearML:
    """ClearML, in the project adloco."""

    key: ClassVar[str] = "clearml"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # Turns off ClearML's hooks on torch.save, argparse and TensorBoard.
        options = {
            "run_name": PROJECT,
            "task_name": folder.name,
            "auto_connect_frameworks": False,
            "auto_connect_arg_parser": False,
        }
        return open_with_accelerate(self.key, settings, options)
