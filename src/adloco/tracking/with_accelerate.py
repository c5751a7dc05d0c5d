"""The experiment trackers that accelerate knows, each with the options of its class there."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from adloco.tracking.tracker import Tracker

PROJECT = "adloco"


class TensorBoard:
    """TensorBoard, with its files in the folder tensorboard of the run."""

    key: ClassVar[str] = "tensorboard"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # A resumed run writes the rounds after its checkpoint again: purge_step hides the old ones.
        options = {"run_name": self.key, "logging_dir": folder, "purge_step": tokens + 1}
        return _opened(self.key, settings, options)


class Wandb:
    """Weights & Biases, in the project WANDB_PROJECT or adloco."""

    key: ClassVar[str] = "wandb"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        options = {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), "name": folder.name}
        return _opened(self.key, settings, options)


class ClearML:
    """ClearML, in the project adloco."""

    key: ClassVar[str] = "clearml"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # Turns off ClearML's hooks on torch.save, argparse and TensorBoard. It would also empty the
        # last task of this name, which has the rounds before a resume.
        options = {
            "run_name": PROJECT,
            "task_name": folder.name,
            "reuse_last_task_id": False,
            "auto_connect_frameworks": False,
            "auto_connect_arg_parser": False,
        }
        return _opened(self.key, settings, options)


class MLflow:
    """MLflow, in the experiment adloco."""

    key: ClassVar[str] = "mlflow"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        # MLflow refuses other values of a run's settings, such as a longer budget.
        given = {} if tokens and "MLFLOW_RUN_ID" in os.environ else settings
        return _opened(self.key, given, {"experiment_name": PROJECT, "run_name": folder.name})


class Trackio:
    """Trackio, in the project adloco."""

    key: ClassVar[str] = "trackio"

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> Tracker:
        options = {"run_name": PROJECT, "name": folder.name, "resume": "allow"}
        return _opened(self.key, settings, options)


@contextmanager
def state_kept() -> Iterator[None]:
    """Put accelerate's state back at the end: an Accelerator that is made in this process later
    would otherwise compute where trackers need the state to say, on the CPU.
    """
    from accelerate.state import PartialState

    before = dict(PartialState._shared_state)
    try:
        yield
    finally:
        PartialState._shared_state.clear()
        PartialState._shared_state.update(before)


def _opened(name: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Tracker:
    """Start the tracker of this name in accelerate, with these arguments of its class, and give it
    the settings.
    """
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from accelerate.utils import patch_environment

    # accelerate's trackers ask its PartialState which process is the main one. With these variables
    # PartialState takes this process for the only one, on the CPU: it neither joins nor starts a
    # process group, and changes neither the current device nor the number of threads.
    with patch_environment(LOCAL_RANK=-1, ACCELERATE_TORCH_DEVICE="cpu"):
        PartialState()
    tracker = LOGGER_TYPE_TO_CLASS[name](**options)
    tracker.start()
    tracker.store_init_configuration(dict(settings))
    return tracker  # type: ignore[no-any-return]
