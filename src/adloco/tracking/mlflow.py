"""MLflow, in the experiment adloco."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import PROJECT, Tracker, open_with_accelerate


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """MLflow, in the experiment adloco."""

    key: ClassVar[str] = "mlflow"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        options = {"experiment_name": PROJECT, "run_name": folder.name}
        return open_with_accelerate(self.key, settings, options)
