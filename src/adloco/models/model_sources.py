"""Where a run's model comes from: a shipped Llama shape, or any model of transformers by hub name,
folder or type; settings of section [model].

Whether trained weights come along must be said. Code from the hub is never run.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from adloco.errors import require


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_position: int
    vocab_size: int
    rms_norm_eps: float


SHAPES = {
    "nano": Shape(128, 4, 4, 4, 352, 1024, 0, 1e-6),
    "microllama": Shape(1024, 12, 16, 4, 5632, 2048, 32_000, 1e-5),
    "tinyllama": Shape(2048, 22, 32, 4, 5632, 2048, 32_000, 1e-5),
    "openllama-3b": Shape(3200, 26, 32, 32, 8640, 2048, 32_000, 1e-6),
}
"""869,504 parameters with bytes; 304,636,928, 1,100,048,384 and 3,426,473,600 with 32,000 tokens. A
vocabulary of 0 is the tokenizer's.
"""

Head = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""Class in transformers that puts the task's head on a model."""


def is_causal(head: Head) -> bool:
    """Whether the model is a language model, which predicts tokens, and not a classifier."""
    return head == "AutoModelForCausalLM"


class ModelSource(Protocol):
    """Where a model's configuration comes from, and whether weights come with it."""

    @property
    def weights(self) -> str:
        """Hub name or folder of trained weights; empty to draw them."""
        ...

    def config(self, vocab_size: int) -> Any:
        """The configuration, of transformers, for a tokenizer with this many ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama with random weights. Sizes of 0 are those of the shape."""

    shape: Literal["nano", "microllama", "tinyllama", "openllama-3b"] = "nano"
    """nano (0.9M parameters with bytes), microllama (305M), tinyllama (1.1B) or openllama-3b
    (3.4B); sizes given below replace its own.
    """
    hidden_size: int = 0
    """Width of the residual stream."""
    num_layers: int = 0
    """Transformer blocks."""
    num_heads: int = 0
    """Attention heads."""
    num_kv_heads: int = 0
    """Key and value heads; fewer than the attention heads for grouped-query attention."""
    intermediate_size: int = 0
    """Width of the feed-forward blocks."""
    max_position: int = 0
    """Longest context in tokens."""
    vocab_size: int = 0
    """Rows of the embedding; 0: 32,000 for all shapes but nano, whose vocabulary is the
    tokenizer's.
    """
    tie_embeddings: bool = False
    """Whether the output head shares the embedding's weights."""

    def __post_init__(self) -> None:
        require(
            self.shape in SHAPES,
            f"model.shape must be one of {', '.join(SHAPES)}, got {self.shape!r}",
        )
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "intermediate_size",
            "max_position",
            "vocab_size",
        ):
            require(
                getattr(self, name) >= 0,
                f"model.{name} must be >= 0 (0: as the shape has it), got {getattr(self, name)}",
            )
        sizes = self.sizes
        require(
            sizes.hidden_size % (2 * sizes.num_heads) == 0,
            f"model.hidden_size must be a multiple of 2 x model.num_heads = {2 * sizes.num_heads}, got {sizes.hidden_size}",
        )
        require(
            sizes.num_heads % sizes.num_kv_heads == 0,
            f"model.num_kv_heads must divide model.num_heads = {sizes.num_heads}, got {sizes.num_kv_heads}",
        )

    @property
    def sizes(self) -> Shape:
        """The shape with the sizes that were given."""
        shape = SHAPES[self.shape]
        # A shape scaled down to fewer heads keeps as many key and value heads as fit.
        heads = self.num_heads or shape.num_heads
        return Shape(
            hidden_size=self.hidden_size or shape.hidden_size,
            num_layers=self.num_layers or shape.num_layers,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads or min(shape.num_kv_heads, heads),
            intermediate_size=self.intermediate_size or shape.intermediate_size,
            max_position=self.max_position or shape.max_position,
            vocab_size=self.vocab_size or shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
        )

    @property
    def weights(self) -> str:
        return ""

    def config(self, vocab_size: int) -> Any:
        from transformers import LlamaConfig

        sizes = self.sizes
        return LlamaConfig(
            vocab_size=sizes.vocab_size or vocab_size,
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            intermediate_size=sizes.intermediate_size,
            max_position_embeddings=sizes.max_position,
            rms_norm_eps=sizes.rms_norm_eps,
            tie_word_embeddings=self.tie_embeddings,
        )


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Any model of transformers. Whether its trained weights are wanted must be said."""

    name: str
    """Hub name or folder of a model; from scratch also a bare type such as bert or gpt2."""
    pretrained: bool
    """true: start from its trained weights; false: take its shape alone and draw the weights."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values of the model's configuration to replace, for instance { num_hidden_layers = 2 }."""

    @property
    def weights(self) -> str:
        return self.name if self.pretrained else ""

    def config(self, vocab_size: int) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        from_type = not self.pretrained and self.name in CONFIG_MAPPING
        try:
            default = (
                CONFIG_MAPPING[self.name]()
                if from_type
                else AutoConfig.from_pretrained(self.name, trust_remote_code=False)
            )
        except Exception as error:  # transformers raises OSError, ValueError and errors of hub clients here, in paragraphs.
            allowed = "allowed are a folder with config.json, a hub name that can be reached, or from scratch a type such as bert"
            raise ValueError(
                f"model.name {self.name!r} could not be loaded ({type(error).__name__}); {allowed}"
            ) from error
        language = hasattr(default, "vocab_size") and not getattr(
            default, "is_encoder_decoder", False
        )
        require(
            language,
            f"model.name {self.name!r} is a {default.model_type}, which no task here trains; take a decoder such as gpt2 or an encoder such as bert",
        )
        for key in self.overrides:
            nearest = difflib.get_close_matches(key, list(default.to_dict()), n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else "see its config.json"
            require(
                hasattr(default, key),
                f"model.overrides has {key!r}, which the configuration of {self.name!r} does not know; {advice}",
            )
        sizes = ({"vocab_size": vocab_size} if from_type else {}) | dict(self.overrides)
        try:
            # Built anew, as values that follow from others (a head's width, say) must follow from
            # the new ones.
            config = (
                CONFIG_MAPPING[self.name](**sizes)
                if from_type
                else AutoConfig.from_pretrained(self.name, trust_remote_code=False, **sizes)
            )
        except Exception as error:  # Values of wrong types and sizes that do not go together, in the library's own words.
            raise ValueError(
                f"model.overrides do not fit {self.name!r}: {' '.join(str(error).split())[:200]}"
            ) from error
        require(
            vocab_size <= config.vocab_size,
            f"model.name {self.name!r} has {config.vocab_size} embeddings, fewer than the {vocab_size} ids of the tokenizer; "
            "set data.tokenizer to the model's own"
            + ("" if self.pretrained else ", or model.overrides { vocab_size = ... }"),
        )
        return config


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is held and run."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters, gradients and optimizer state; run.precision is that of the
    computation.
    """
    gradient_checkpointing: bool = False
    """Whether to compute activations a second time in the backward pass instead of keeping them."""
