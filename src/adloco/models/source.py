"""What a model source is, and how models are held and run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from adloco.distributed.parallel.layers import Fill
from adloco.models.weights import StoredWeights

Head = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""Class in transformers that puts the task's head on a model."""


def is_causal(head: Head) -> bool:
    """Whether the model is a language model, which predicts tokens, and not a classifier."""
    return head == "AutoModelForCausalLM"


class Builder(Protocol):
    """Builds a run's model from its configuration. A call gives a model, perhaps without memory."""

    def __init__(
        self, *, config: Any, head: Head, options: "ModelOptions", seed: int, weights: str = ""
    ) -> None: ...

    @property
    def config(self) -> Any: ...

    @property
    def options(self) -> "ModelOptions": ...

    @property
    def weights(self) -> str:
        """Hub name or folder of trained weights; empty to draw them."""
        ...

    @property
    def stored(self) -> StoredWeights:
        """Where the trained weights are; nowhere for a model from scratch."""
        ...

    @property
    def filling(self) -> Fill | None:
        """Gives memory and values to a part of the model that a call has built; None if the model
        has them already.
        """
        ...

    def __call__(self) -> nn.Module: ...

    def whole(self) -> nn.Module:
        """A model with memory and values, on the CPU."""
        ...

    def num_parameters(self) -> int: ...

    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        ...

    def save_config(self, folder: Path) -> None:
        """Write the configuration, so that the run's model can be built again from the folder."""
        ...

    @staticmethod
    def load_config(folder: Path) -> Any:
        """The configuration in a folder."""
        ...


class ModelSource(Protocol):
    """Gives a model's configuration, says whether weights come with it and what builds it."""

    @property
    def builder(self) -> type[Builder]:
        """What builds a model from the configuration."""
        ...

    @property
    def for_transformers(self) -> bool:
        """True if transformers can load the model, so that `adloco export` can write it."""
        ...

    @property
    def weights(self) -> str:
        """Hub name or folder of trained weights; empty to draw them."""
        ...

    def config(self, vocab_size: int) -> Any:
        """The model's configuration for a tokenizer with this many ids.

        It has `vocab_size`, `model_type` and `to_dict()`, as those of transformers do.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is held and run."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters, gradients and optimizer state; run.precision is that of the
    computation.
    """
    gradient_checkpointing: bool = False
    """Compute activations a second time in the backward pass instead of keeping them."""
