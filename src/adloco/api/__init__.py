"""Whole runs from Python: what `adloco train` does in a function, and runs read back."""

from adloco.api.train_function import train
from adloco.api.trained_run import TrainedRun, load

__all__ = ["TrainedRun", "load", "train"]
