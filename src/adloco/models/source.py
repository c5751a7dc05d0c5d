"""Protocols of model sources and builders, and the options that all models share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from adloco.setting import setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adloco.distributed.parallel.layers import Fill
    from adloco.models.weights import StoredWeights

MOST_LAYERS = 1 << 12
"""More layers are a mistake; even without memory they would take minutes to build."""
Head = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""Class in transformers that puts the task's head on a model."""


def is_causal(head: Head) -> bool:
    """True for a language model, which predicts tokens; False for a classifier."""
    return head == "AutoModelForCausalLM"


class Builder(Protocol):
    """Builds a run's model from its configuration.

    A call returns a model. If it has no memory yet, `filling` gives it memory and values.
    """

    def __init__(
        self, *, config: Any, head: Head, options: ModelOptions, seed: int, weights: str = ""
    ) -> None: ...

    @property
    def config(self) -> Any: ...

    @property
    def options(self) -> ModelOptions: ...

    @property
    def weights(self) -> str:
        """Hub name or folder of trained weights; empty for a model from scratch."""

    @property
    def stored(self) -> StoredWeights:
        """Places of the trained weights on disk; none for a model from scratch."""

    @property
    def filling(self) -> Fill | None:
        """Function that gives memory and values to a part of a model that a call has built; None if
        a call returns complete models.
        """

    def __call__(self) -> nn.Module: ...

    def whole(self) -> nn.Module:
        """Build a complete model, with memory and values, on the CPU."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The model's parameters, without memory (on the meta device)."""

    def save_config(self, folder: Path) -> None:
        """Write the configuration, so that the run's model can be built again from the folder."""

    @staticmethod
    def load_config(folder: Path) -> Any:
        """Read the configuration that `save_config` wrote."""


OF_A_FILE = {"_name_or_path", "transformers_version"}
"""Entries of a configuration that say where it is from."""


def entries_of(config: Any) -> dict[str, Any]:
    """A model's configuration as JSON has it, without what says where it is from."""
    to_dict = getattr(config, "to_dict", None)
    if to_dict is not None:  # First: asdict fails on a dataclass of transformers with other layers.
        entries = to_dict()
    else:
        entries = config if isinstance(config, dict) else asdict(config)
    plain = json.loads(json.dumps(entries, default=str))
    return {name: value for name, value in plain.items() if name not in OF_A_FILE}


def num_bytes(builder: Builder) -> int:
    """Bytes of all parameters of a model."""
    return sum(parameter.nbytes for parameter in builder.parameters)


class ModelSource(Protocol):
    """Source of a model: its configuration, its trained weights and its builder."""

    for_transformers: ClassVar[bool]
    """True if transformers can load the model, so that `adloco export` can write it."""

    @property
    def builder(self) -> type[Builder]:
        """Class that builds a model from the configuration."""

    @property
    def weights(self) -> str:
        """Hub name or folder of trained weights; empty for a model from scratch."""

    def config(self, vocab_size: int) -> Any:
        """The model's configuration.

        vocab_size: Number of ids of the tokenizer.

        Returns:
            An object with `vocab_size`, as configurations of transformers have it.
        """


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Data type and memory of a model from any source."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters, gradients and inner optimizer state. bf16 takes half the memory and
    one copy more, of what rounding takes off steps. The data type of the computation is
    run.precision.
    """
    gradient_checkpointing: bool = setting(False, equal="")
    """Compute activations again in the backward pass instead of keeping them in memory."""
