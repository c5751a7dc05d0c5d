"""Whole runs from Python: what `adloco train` does in a function, and runs read back."""

from adloco.api.train_function import train as train
from adloco.api.trained_run import TrainedRun as TrainedRun
from adloco.api.trained_run import load as load
