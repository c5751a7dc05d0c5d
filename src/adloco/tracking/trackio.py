"""Trackio, in the project adloco."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import PROJECT, Tracker, open_with_accelerate


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Trackio, in the project adloco."""

    key: ClassVar[str] = "trackio"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        options = {"run_name": PROJECT, "name": folder.name, "resume": "allow"}
        return open_with_accelerate(self.key, settings, options)
